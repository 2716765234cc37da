"""Every formula of vime/algo against the shared cases.

Our choice where frameworks differ (cases/DISAGREEMENTS.md): dual clip for negative advantages only; low_var_kl limits
k3 to +-10 and k3 itself is unlimited; the default loss is the token mean per trajectory over a constant number of
trajectories, and the sequence mean counts empty sequences.

Advantages are in test_advantages.py, PPO's critic in test_ppo.py, tis in test_correction.py, `grading` is in
tests/rewards.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.golden.loader import all_cases, check, columns, cu_seqlens, each_case, flat, spread
from tests.golden.softmax import token_entropy, token_log_probs
from vime.algo.cispo import cispo_loss
from vime.algo.kl import kl_estimate
from vime.algo.mismatch import log_prob_abs_diff
from vime.algo.opsm import on_policy_enough
from vime.algo.policy_loss import clipped_loss
from vime.algo.reduce import sequence_mean_weights, token_loss_weights, token_mean_weights, token_sum_weights
from vime.algo.sequences import Sequences
from vime.support import SamplingSupport
from vime.trainer.megatron.batches.support import MicroSupport
from vime.trainer.megatron.losses.log_probs import chunked_log_probs

KINDS_WITH_A_TEST_HERE = {
    "ppo_loss",
    "cispo_loss",
    "kl",
    "logprob",
    "aggregate",
    "abs_diff",
    "opsm",
    "policy_gradient",
}
KINDS_OF_ADVANTAGES = {"group_advantages", "reinforce_pp", "reinforce_pp_baseline"}  # test_advantages.py
KINDS_OF_PPO = {"gae", "whiten", "value_loss"}  # test_ppo.py
KINDS_OF_CORRECTION = {"tis"}  # test_correction.py


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Over the tokens of weight above 0: the trainer computes nothing for the others."""
    return (values[weights != 0] * weights[weights != 0]).sum()


def test_no_kind_of_case_is_forgotten():
    elsewhere = KINDS_OF_ADVANTAGES | KINDS_OF_PPO | KINDS_OF_CORRECTION
    assert {case["kind"] for case in all_cases()} == KINDS_WITH_A_TEST_HERE | elsewhere


def sequence_means(values: torch.Tensor, case: dict) -> torch.Tensor:
    """[P] of the tokens under mask 1, each one's mean over its row."""
    mask = torch.from_numpy(flat(case["inputs"]["mask"]))
    rows = torch.repeat_interleave(torch.tensor([len(row) for row in case["inputs"]["mask"]]))
    counts = torch.zeros(len(case["inputs"]["mask"]), dtype=values.dtype).index_add(0, rows, mask.to(values.dtype))
    return Sequences(rows[mask != 0], counts).mean(values)


@each_case("ppo_loss")
def test_ppo_loss(case, dtype):
    p = case["params"]
    logp, old, advantages, mask = columns(case, dtype, "logp", "logp_old", "advantages", "mask")
    on = mask != 0
    bounds = dict(eps_clip=p["eps_low"], eps_clip_high=p["eps_high"], eps_clip_c=p["dual_c"])
    if p["level"] == "sequence":
        got = clipped_loss(sequence_means((logp - old)[on], case), advantages[on], **bounds)
        starts = cu_seqlens(case)[:-1]
        first = [int(start) + row.index(1) for start, row in zip(starts, case["inputs"]["mask"], strict=True)]
        check(spread(got.ratio, mask)[first], case, "ratio", dtype)
    else:
        got = clipped_loss(logp[on] - old[on], advantages[on], **bounds)
        unmasked = {"expected": {"ratio": flat(case["expected"]["ratio"])[on.numpy()].tolist()}}  # also under mask 0
        check(got.ratio, case | unmasked, "ratio", dtype)
    loss, clipped = spread(got.loss, mask), spread(got.clipped, mask)
    check(loss, case, "token_loss", dtype)
    check(clipped, case, "clipped", dtype)
    check(spread(got.dual_clipped, mask), case, "dual_clipped", dtype)

    borders, rows = cu_seqlens(case), len(case["inputs"]["mask"])
    token_mean = torch.from_numpy(token_mean_weights(mask.numpy(), borders, np.zeros(rows)))
    check(weighted_sum(loss, token_mean), case, "loss_token_mean", dtype)
    check(weighted_sum(clipped.double(), token_mean), case, "clipfrac_token_mean", dtype)
    check(weighted_sum(old - logp, token_mean), case, "approx_kl_k1_token_mean", dtype)
    # A sequence mean is the trajectory mean when every sequence is its own trajectory and none is empty.
    seq_mean = torch.from_numpy(token_loss_weights(mask.numpy(), borders, np.arange(rows), rows))
    check(weighted_sum(loss, seq_mean), case, "loss_seq_mean", dtype)
    check(weighted_sum(clipped.double(), seq_mean), case, "clipfrac_seq_mean", dtype)


@each_case("cispo_loss")
def test_cispo_loss(case, dtype):
    p = case["params"]
    logp, old, advantages, mask = columns(case, dtype, "logp", "logp_old", "advantages", "mask")
    logp.requires_grad_()
    bounds, on = dict(eps_clip=1 - p["ratio_lo"], eps_clip_high=p["ratio_hi"] - 1), mask != 0
    got = cispo_loss(logp[on], old[on], advantages[on], **bounds)
    loss = spread(got.loss, mask)
    check(loss, case, "token_loss", dtype)
    check(spread(got.clipped, mask), case, "clipped", dtype)
    weight = got.ratio.clamp(p["ratio_lo"], p["ratio_hi"])
    of_tokens = {"expected": {"weight": flat(case["expected"]["weight"])[on.numpy()].tolist()}}
    check(weight, case | of_tokens, "weight", dtype)
    rows = len(case["inputs"]["mask"])
    token_mean = torch.from_numpy(token_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(rows)))
    check(weighted_sum(loss, token_mean), case, "loss_token_mean", dtype)
    seq_mean = sequence_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(rows), count_empty=False)
    check(weighted_sum(loss, torch.from_numpy(seq_mean)), case, "loss_seq_mean", dtype)
    got.loss.sum().backward()
    check(logp.grad, case, "dloss_dlogp", dtype)


@each_case("opsm")
def test_off_policy_sequence_masking(case, dtype):
    logp, old, mask = columns(case, dtype, "logp", "logp_old", "mask")
    assert mask.all()
    lengths = torch.tensor([len(row) for row in case["inputs"]["mask"]])
    rows = torch.repeat_interleave(lengths)
    advantages = torch.tensor(case["inputs"]["advantages"])[rows]
    sequences = Sequences(rows, lengths.to(logp.dtype))
    keep, moved = on_policy_enough(logp, old, advantages, sequences, delta=case["params"]["delta"])
    first = cu_seqlens(case)[:-1]
    check(moved[first], case, "seq_kl", dtype)
    check(keep[first], case, "keep", dtype)
    assert int((~keep[first]).sum()) == case["expected"]["dropped_sequences"]


@each_case("kl", where=lambda case: "unbiased_k3" in case["expected"])
@pytest.mark.parametrize(("kind", "key"), [("k1", "k1"), ("k3", "k3"), ("low_var_kl", "low_var_kl_clamp10")])
def test_unbiased_kl(case, dtype, kind, key):
    logp, old, ref, mask = columns(case, dtype, "logp", "logp_old", "logp_ref", "mask")
    on = mask != 0
    got = spread(kl_estimate(logp[on], ref[on], kind, log_ratio=(logp - old)[on]), mask)
    check(got, case, f"unbiased_{key}", dtype)
    weights = token_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(len(case["inputs"]["mask"])))
    check(weighted_sum(got, torch.from_numpy(weights)), case, f"unbiased_{key}_token_mean", dtype)


@each_case("kl")
@pytest.mark.parametrize(
    ("kind", "key"),
    [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("abs", "abs"), ("low_var_kl", "low_var_kl_clamp10")],
)
def test_kl(case, dtype, kind, key):
    logp, ref, mask = columns(case, dtype, "logp", "logp_ref", "mask")
    on = mask != 0
    got = spread(kl_estimate(logp[on], ref[on], kind), mask)
    check(got, case, key, dtype)
    weights = token_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(len(case["inputs"]["mask"])))
    check(weighted_sum(got, torch.from_numpy(weights)), case, f"{key}_token_mean", dtype)


@each_case("logprob")
def test_log_probs_and_entropy(case, dtype):
    logits = torch.tensor(case["inputs"]["logits"], dtype=getattr(torch, dtype))
    tokens = torch.tensor(case["inputs"]["tokens"])
    temperature = case["params"]["temperature"]
    check(token_log_probs(logits, tokens, temperature=temperature), case, "logp_full", dtype)
    check(token_entropy(logits, temperature=temperature), case, "entropy_full", dtype)


@pytest.mark.parametrize("key", ["support", "support_joint"])
@pytest.mark.parametrize("chunk_size", [1, 64])
# A float32 logit of 1000 has steps of 6e-5: more than the tolerance, whoever computes.
@each_case("logprob", where=lambda case: np.abs(case["inputs"]["logits"][0]).max() < 100)
def test_the_trainers_log_probs_over_a_support(case, dtype, key, chunk_size):
    """Which tokens a support has is the engine's to say."""
    logits = torch.tensor(case["inputs"]["logits"])  # of hidden states that are logits, by a head that is the identity
    tokens = np.array(case["inputs"]["tokens"])
    sizes = [len(ids) for ids in case["expected"][key]]
    ids = np.concatenate(case["expected"][key]).astype(np.int32)
    support = SamplingSupport(ids, np.cumsum([0, *sizes]))
    inside = ~support.lacks(tokens)
    name = f"logp_{key}"
    assert [value is not None for value in case["expected"][name]] == inside.tolist()
    wanted = np.flatnonzero(inside)
    log_probs, entropy = chunked_log_probs(
        logits[inside],
        torch.eye(logits.shape[1]),
        torch.from_numpy(tokens[inside]),
        temperature=case["params"]["temperature"],
        chunk_size=chunk_size,
        support=MicroSupport.of(support, wanted, torch.device("cpu")),
    )
    kept = {"expected": {name: [value for value in case["expected"][name] if value is not None]}}
    check(log_probs, case | kept, name, "float32")
    if key == "support":
        kept = {"expected": {"entropy": flat(case["expected"]["entropy_support"])[inside].tolist()}}
        check(entropy, case | kept, "entropy", "float32")


@each_case("aggregate")
def test_aggregation(case, dtype):
    """The weights are made once for the whole step; each shard then sums its own tokens."""
    x, mask = (c.numpy() for c in columns(case, dtype, "x", "mask"))
    borders, rollouts = cu_seqlens(case), np.array(case["inputs"]["rollout_ids"])
    n, step = len(rollouts), np.zeros(len(rollouts))
    for key, weights in (
        ("rollout_mean", token_loss_weights(mask, borders, rollouts, case["params"]["n_global"])),
        ("token_mean", token_mean_weights(mask, borders, step)),
        ("seq_mean_incl_empty", sequence_mean_weights(mask, borders, step)),
        ("seq_mean_excl_empty", sequence_mean_weights(mask, borders, step, count_empty=False)),
        ("seq_sum_incl_empty", token_sum_weights(mask, borders, n_global=n)),
        ("const_length", token_sum_weights(mask, borders, n_global=n, length=case["params"]["l_max"])),
    ):
        want = case["expected"][key]
        rows = [slice(a, b) for a, b in pairwise(borders)]
        weighted = [float((weights[row] * x[row]).sum()) for row in rows]
        shards = [sum(weighted[i] for i in np.ravel(shard).tolist()) for shard in case["inputs"]["shards"]]
        flattened = case | {"expected": {"loss": want["loss"], "shards": want["shard_contributions"]}}
        check(sum(weighted), flattened, "loss", dtype)
        check(shards, flattened, "shards", dtype)


@each_case("abs_diff")
def test_log_prob_difference(case, dtype):
    train, rollout, mask = (c.numpy() for c in columns(case, dtype, "logp_train", "logp_rollout", "mask"))
    train[mask == 0] = np.nan
    index = np.repeat(case["inputs"]["rollout_ids"], np.diff(cu_seqlens(case)))
    got = log_prob_abs_diff(train, rollout, mask, index, case["params"]["n_global"])
    check(got.mean, case, "per_rollout_mean", dtype)
    check(got.max, case, "max", dtype)
    pooled = log_prob_abs_diff(train, rollout, mask, np.zeros_like(index), 1)
    check(pooled.mean, case, "token_mean", dtype)


@each_case("policy_gradient")
def test_policy_gradient(case, dtype):
    """Loss and its gradient by autograd, through log-probs, ratio, clip, KL, entropy and reduction."""
    p, inputs = case["params"], case["inputs"]
    logits = torch.tensor([row for rows in inputs["logits"] for row in rows], dtype=getattr(torch, dtype))
    logits.requires_grad_()
    tokens = torch.from_numpy(flat(inputs["tokens"])).long()
    old, advantages, mask = columns(case, dtype, "logp_old", "advantages", "mask")
    rows, temperature = len(inputs["mask"]), p.get("temperature", 1.0)
    on = mask != 0
    log_probs, advantages = token_log_probs(logits, tokens, temperature=temperature)[on], advantages[on]
    log_ratio = log_probs - old[on]
    if p["algo"] == "gspo":
        log_ratio = sequence_means(log_ratio, case)
    if p["algo"] == "cispo":
        bounds = dict(eps_clip=1 - p["ratio_lo"], eps_clip_high=p["ratio_hi"] - 1)
        loss = cispo_loss(log_probs, old[on], advantages, **bounds).loss
    else:
        bounds = dict(eps_clip=p["eps_low"], eps_clip_high=p["eps_high"])
        loss = clipped_loss(log_ratio, advantages, **bounds).loss
    if "is_weights" in inputs:
        loss = loss * columns(case, dtype, "is_weights")[0][on]
    if "kl_coef" in p:
        (ref,) = columns(case, dtype, "logp_ref")
        ratio = log_ratio if p.get("unbiased_kl") else None
        loss = loss + p["kl_coef"] * kl_estimate(log_probs, ref[on], p["kl_kind"], log_ratio=ratio)
    if "entropy_coef" in p:
        loss = loss - p["entropy_coef"] * token_entropy(logits, temperature=temperature)[on]
    if p["agg"] == "token_mean":
        weights = token_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(rows))
    else:
        assert p["agg"] == "seq_mean", p["agg"]
        weights = sequence_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(rows), count_empty=False)
    total = weighted_sum(spread(loss, mask), torch.from_numpy(weights))
    check(total, case, "loss", dtype)
    total.backward()
    check(logits.grad, case, "grad_logits", dtype)
