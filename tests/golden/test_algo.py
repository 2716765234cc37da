"""Every formula of vime/algo against the shared cases.

Our choice where frameworks differ (cases/DISAGREEMENTS.md): group std with n-1, a group of one gets 0, siblings count
once; dual clip for negative advantages only; low_var_kl limits k3 to +-10 and k3 itself is unlimited; the loss is the
token mean per trajectory over a constant number of trajectories.

Of the other kinds, `grading` is tested with the graders (tests/rewards), and these wait for their feature:
ppo_loss at sequence level and policy_gradient with gspo (GSPO); cispo_loss and policy_gradient with cispo (CISPO);
unbiased_* of kl and policy_gradient with unbiased_kl (--use-unbiased-kl); support of logprob (top-p, top-k training);
rloo of group_advantages, reinforce_pp and reinforce_pp_baseline (REINFORCE++); tis (TIS, IcePop, MIS); opsm (OPSM);
seq_mean, seq_sum and const_length of aggregate (other reducers). gae, whiten and value_loss are in test_ppo.py.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.golden.loader import all_cases, check, columns, cu_seqlens, each_case, flat
from vime.algo.advantages import group_advantages
from vime.algo.kl import kl_estimate
from vime.algo.logprob import token_entropy, token_log_probs
from vime.algo.mismatch import log_prob_abs_diff
from vime.algo.policy_loss import ppo_clip_loss
from vime.algo.reduce import token_loss_weights, token_mean_weights

KINDS_WITH_A_TEST_HERE = {
    "group_advantages",
    "ppo_loss",
    "kl",
    "logprob",
    "aggregate",
    "abs_diff",
    "policy_gradient",
}
KINDS_OF_PPO = {"gae", "whiten", "value_loss"}  # test_ppo.py
KINDS_THAT_WAIT = {"reinforce_pp", "reinforce_pp_baseline", "cispo_loss", "tis", "opsm"}


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Over the tokens of weight above 0: the trainer computes nothing for the others."""
    return (values[weights != 0] * weights[weights != 0]).sum()


def test_no_kind_of_case_is_forgotten():
    assert {case["kind"] for case in all_cases()} == KINDS_WITH_A_TEST_HERE | KINDS_OF_PPO | KINDS_THAT_WAIT


@each_case("group_advantages")
def test_group_advantages(case, dtype):
    inputs = case["inputs"]
    rewards = np.array(inputs["rewards"], dtype)
    got = group_advantages(rewards, inputs["group_ids"], inputs.get("rollout_ids"), std_eps=case["params"]["eps"])
    check(got, case, "grpo_unbiased_std", dtype)
    centred = group_advantages(rewards, inputs["group_ids"], inputs.get("rollout_ids"), std_eps=None)
    check(centred, case, "dr_grpo", dtype)


@each_case("ppo_loss", where=lambda case: case["params"]["level"] == "token")
@pytest.mark.parametrize("masked_value", ["as given", float("nan")])
def test_ppo_loss(case, dtype, masked_value):
    p = case["params"]
    logp, old, advantages, mask = columns(case, dtype, "logp", "logp_old", "advantages", "mask")
    if masked_value != "as given":
        for column in (logp, old, advantages):
            column[mask == 0] = masked_value
    got = ppo_clip_loss(
        logp, old, advantages, eps_clip=p["eps_low"], eps_clip_high=p["eps_high"], eps_clip_c=p["dual_c"], mask=mask
    )
    on = mask != 0
    check(got.loss, case, "token_loss", dtype)
    unmasked = {"expected": {"ratio": flat(case["expected"]["ratio"])[on.numpy()].tolist()}}  # given under mask 0, too
    check(got.ratio[on], case | unmasked, "ratio", dtype)
    check(got.clipped, case, "clipped", dtype)
    check(got.dual_clipped, case, "dual_clipped", dtype)

    borders, rows = cu_seqlens(case), len(case["inputs"]["mask"])
    token_mean = torch.from_numpy(token_mean_weights(mask.numpy(), borders, np.zeros(rows)))
    check(weighted_sum(got.loss, token_mean), case, "loss_token_mean", dtype)
    check(weighted_sum(got.clipped.double(), token_mean), case, "clipfrac_token_mean", dtype)
    check(weighted_sum(old - logp, token_mean), case, "approx_kl_k1_token_mean", dtype)
    # A sequence mean is the trajectory mean when every sequence is its own trajectory and none is empty.
    seq_mean = torch.from_numpy(token_loss_weights(mask.numpy(), borders, np.arange(rows), rows))
    check(weighted_sum(got.loss, seq_mean), case, "loss_seq_mean", dtype)
    check(weighted_sum(got.clipped.double(), seq_mean), case, "clipfrac_seq_mean", dtype)


@each_case("kl")
@pytest.mark.parametrize(
    ("kind", "key"),
    [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("abs", "abs"), ("low_var_kl", "low_var_kl_clamp10")],
)
def test_kl(case, dtype, kind, key):
    logp, ref, mask = columns(case, dtype, "logp", "logp_ref", "mask")
    got = kl_estimate(logp, ref, kind, mask=mask)
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


@each_case("aggregate")
def test_aggregation(case, dtype):
    """The weights are made once for the whole step; each shard then sums its own tokens."""
    x, mask = (c.numpy() for c in columns(case, dtype, "x", "mask"))
    borders, rollouts = cu_seqlens(case), np.array(case["inputs"]["rollout_ids"])
    for key, weights in (
        ("rollout_mean", token_loss_weights(mask, borders, rollouts, case["params"]["n_global"])),
        ("token_mean", token_mean_weights(mask, borders, np.zeros(len(rollouts)))),
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


def _uses_what_is_there(case):
    return case["params"]["algo"] == "ppo" and not case["params"].get("unbiased_kl")


@each_case("policy_gradient", where=_uses_what_is_there)
def test_policy_gradient(case, dtype):
    """Loss and its gradient by autograd, through log-probs, ratio, clip, KL, entropy and reduction."""
    p, inputs = case["params"], case["inputs"]
    logits = torch.tensor([row for rows in inputs["logits"] for row in rows], dtype=getattr(torch, dtype))
    logits.requires_grad_()
    tokens = torch.from_numpy(flat(inputs["tokens"])).long()
    old, advantages, mask = columns(case, dtype, "logp_old", "advantages", "mask")
    rows, temperature = len(inputs["mask"]), p.get("temperature", 1.0)
    log_probs = token_log_probs(logits, tokens, temperature=temperature)
    loss = ppo_clip_loss(log_probs, old, advantages, eps_clip=p["eps_low"], eps_clip_high=p["eps_high"], mask=mask).loss
    if "kl_coef" in p:
        (ref,) = columns(case, dtype, "logp_ref")
        loss = loss + p["kl_coef"] * kl_estimate(log_probs, ref, p["kl_kind"], mask=mask)
    if "entropy_coef" in p:
        loss = loss - p["entropy_coef"] * token_entropy(logits, temperature=temperature)
    if p["agg"] == "token_mean":
        weights = token_mean_weights(mask.numpy(), cu_seqlens(case), np.zeros(rows))
    else:
        assert p["agg"] == "seq_mean", p["agg"]
        weights = token_loss_weights(mask.numpy(), cu_seqlens(case), np.arange(rows), rows)
    total = weighted_sum(loss, torch.from_numpy(weights))
    check(total, case, "loss", dtype)
    total.backward()
    check(logits.grad, case, "grad_logits", dtype)
