"""Corrections inside the trainer: weights, masks and divisors by hand, on a tiny model."""

from dataclasses import replace

import numpy as np
import pytest

from tests.trainer.megatron.test_losses import FAST, LENGTHS
from vime.algo.reduce import token_loss_weights
from vime.config import AlgoConfig, CheckpointConfig
from vime.errors import ConfigError, HookError
from vime.types import PG_WEIGHTS

HOOKS = "tests.trainer.megatron.hooks"


@pytest.fixture
def sampled(model_folder, make_trainer, make_batch):
    """(folder, batch, and of tokens under mask 1 their log-ratio, advantage and sample): ratios e^-1.6 to e^1.6."""
    folder, _ = model_folder()

    def make(**kwargs):
        batch = make_batch(LENGTHS, **kwargs)
        first = make_trainer(folder).log_probs(batch)
        moved = np.random.default_rng(3).uniform(-1.6, 1.6, len(first)).astype(np.float32)
        batch = make_batch(LENGTHS, rollout_log_probs=first - moved, **kwargs)
        on, sample = batch.loss_mask == 1, np.repeat(np.arange(8), LENGTHS)
        log_ratio = (first - batch.rollout_log_probs).astype(np.float64)[on]
        return folder, batch, log_ratio, batch.advantages[sample[on]].astype(np.float64), sample[on]

    return make


def test_weights_of_tokens_are_the_bounded_ratio_and_their_metrics_say_what_was_cut(sampled, make_trainer):
    folder, batch, log_ratio, advantages, _ = sampled(micro=3)
    weights, ratio = batch.loss_weights[batch.loss_mask == 1], np.exp(log_ratio)
    algo = AlgoConfig(use_tis=True, tis_clip=2.0, tis_clip_low=0.5)
    got = make_trainer(folder, algo=algo).train(batch)
    assert got["train/pg_loss"] == pytest.approx(-(weights * ratio.clip(0.5, 2) * advantages).sum(), rel=1e-4)
    low, high = (weights * (ratio < 0.5)).sum(), (weights * (ratio > 2)).sum()
    want = {
        "tis": (weights * ratio).sum(),
        "tis_abs": (weights * abs(ratio - 1)).sum(),
        "tis_weight": (weights * ratio.clip(0.5, 2)).sum(),
        "tis_clipfrac_low": low,
        "tis_clipfrac_high": high,
        "tis_clipfrac": low + high,
    }
    assert min(want.values()) > 0
    assert {name: got[f"train/{name}"] for name in want} == pytest.approx(want, rel=1e-4)
    assert got["train/ratio"] == pytest.approx(1) and got["train/train_rollout_ratio"] == pytest.approx(want["tis"])


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("older", [False, True])
def test_weights_are_of_before_the_first_step_and_the_ratio_of_every_step(sampled, make_trainer, kind, older):
    """An older version's samples have the trainer's own as the old policy, too: the weights hold the whole way."""
    folder, batch, log_ratio, _, _ = sampled(micro=3, steps=2)
    algo = AlgoConfig(pg_loss_type=kind, use_tis=True, tis_mode="mask", tis_clip=2.0, tis_clip_low=0.5, eps_clip=0.01)
    got = make_trainer(folder, algo=algo, megatron=FAST).train(replace(batch, is_older=older))
    weights = batch.loss_weights[batch.loss_mask == 1] / 2  # a mean over both steps
    ratio = np.exp(log_ratio)
    inside = (ratio >= 0.5) & (ratio <= 2)
    assert got["train/tis"] == pytest.approx((weights * ratio).sum(), rel=1e-4)
    assert got["train/tis_weight"] == pytest.approx((weights * ratio * inside).sum(), rel=1e-4)
    assert got["train/ratio"] != pytest.approx(1, abs=1e-6) and got["train/ratio"] == pytest.approx(1, abs=0.1)
    assert got["train/pg_clipfrac"] > 0 or kind == "reinforce"


def test_rejected_tokens_keep_their_place_in_the_divisors_and_in_the_kl(sampled, make_trainer, model_folder):
    folder, batch, log_ratio, advantages, sample = sampled()
    other, _ = model_folder(seed=9)
    settings = dict(use_kl_loss=True, kl_loss_coef=0.1)
    reference = CheckpointConfig(ref_load=str(other))
    plain = make_trainer(folder, algo=AlgoConfig(**settings), checkpoint=reference).train(batch)
    algo = AlgoConfig(use_rs=True, rs_level="geometric", rs_lower_bound=0.9, rs_veto_threshold=0.22, **settings)
    got = make_trainer(folder, algo=algo, checkpoint=reference).train(batch)
    mean = np.bincount(sample, log_ratio) / np.bincount(sample)
    vetoed = np.isin(sample, sample[np.exp(log_ratio) < 0.22])
    rejected = (np.exp(mean) < 0.9)[sample] | vetoed
    assert 0 < vetoed.sum() < rejected.sum() < len(rejected)
    weights = batch.loss_weights[batch.loss_mask == 1]
    assert got["train/pg_loss"] == pytest.approx(-(weights * ~rejected * advantages).sum(), rel=1e-4)
    assert got["train/rs_rejected"] == pytest.approx((weights * rejected).sum(), rel=1e-5)
    assert got["train/rs_vetoed"] == pytest.approx((weights * vetoed).sum(), rel=1e-5)
    assert got["train/kl_loss"] == pytest.approx(plain["train/kl_loss"], rel=1e-6)


def test_removed_tokens_leave_the_divisors_of_their_trajectory_and_the_kl(sampled, make_trainer, model_folder):
    """Siblings' tokens are pooled in what is left, as before; a trajectory that loses all of them counts as nothing."""
    folder, batch, log_ratio, advantages, sample = sampled()
    trajectories = np.array([0, 0, 1, 1, 2, 3, 4, 5])
    log_ratio[sample >= 6] = 1.0  # the last two lose every token
    on = batch.loss_mask == 1
    sampled_log_probs = batch.rollout_log_probs.copy()
    first = make_trainer(folder).log_probs(batch)
    sampled_log_probs[on] = first[on] - log_ratio
    batch = replace(
        batch,
        trajectory_ids=trajectories,
        global_batch_size=6,
        rollout_log_probs=sampled_log_probs,
        loss_weights=token_loss_weights(batch.loss_mask, batch.cu_seqlens, trajectories, 6).astype(np.float32),
    )
    other, _ = model_folder(seed=9)
    reference = make_trainer(other).log_probs(batch)
    settings = dict(use_kl_loss=True, kl_loss_coef=0.1, use_tis=True, tis_mode="mask", tis_clip=2.0, tis_clip_low=0.4)
    algo = AlgoConfig(rejected_tokens="removed", **settings)
    got = make_trainer(folder, algo=algo, checkpoint=CheckpointConfig(ref_load=str(other))).train(batch)
    ratio = np.exp(log_ratio)
    kept = (ratio >= 0.4) & (ratio <= 2)
    mask = batch.loss_mask.copy()
    mask[on] = kept
    weights = token_loss_weights(mask, batch.cu_seqlens, trajectories, 6)[on]
    assert got["train/pg_loss"] == pytest.approx(-(weights * ratio * advantages).sum(), rel=1e-4)
    d = (first - reference).astype(np.float64)[on]
    assert got["train/kl_loss"] == pytest.approx((weights * (np.exp(-d) - 1 + d)).sum(), rel=1e-3)
    before = batch.loss_weights[on]
    assert got["train/tis_clipfrac"] == pytest.approx((before * ~kept).sum(), rel=1e-4)
    diff = np.abs(log_ratio) @ before
    assert got["train/train_rollout_logprob_abs_diff"] == pytest.approx(diff, rel=1e-4)  # of all tokens
    with pytest.raises(ConfigError, match="--rejected-tokens removed cannot weight anew"):
        make_trainer(folder, algo=AlgoConfig(rejected_tokens="removed", use_rs=True, rs_lower_bound=0.5)).train(
            replace(batch, extra={PG_WEIGHTS: batch.loss_weights})
        )


@pytest.mark.parametrize("rejected", ["counted", "removed"])
def test_loss_and_gradient_do_not_depend_on_micro_batches(sampled, make_trainer, make_batch, rejected):
    folder, batch, _, _, _ = sampled(steps=2)
    algo = AlgoConfig(
        use_tis=True, tis_level="sequence", use_rs=True, rs_level="token", rs_upper_bound=4.0, rejected_tokens=rejected
    )
    results = []
    for micro in (None, 3, 1):
        plan = make_batch(LENGTHS, micro=micro, steps=2).steps
        metrics = make_trainer(folder, algo=algo, megatron=FAST).train(replace(batch, steps=plan))
        results.append({n: v for n, v in metrics.items() if n.startswith("train/")})
    assert results[0]["train/tis_clipfrac"] > 0 and results[0]["train/rs_rejected"] > 0
    for got in results[1:]:
        assert got == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in results[0].items()}


def test_a_function_of_ones_own_makes_the_weights(sampled, make_trainer):
    folder, batch, _, _, _ = sampled(micro=3, steps=2)
    built_in = AlgoConfig(use_tis=True, tis_level="geometric", tis_clip=1.2, use_rs=True, rs_veto_threshold=0.25)
    want = make_trainer(folder, algo=built_in, megatron=FAST).train(batch)
    own = AlgoConfig(
        use_tis=True, custom_tis_function_path=f"{HOOKS}.geometric_weights", use_rs=True, rs_veto_threshold=0.25
    )
    got = make_trainer(folder, algo=own, megatron=FAST).train(batch)
    for name in ("loss", "grad_norm", "rs_vetoed", "tis_weight"):
        assert got[f"train/{name}"] == pytest.approx(want[f"train/{name}"], rel=1e-6), name
    assert got["custom/cut"] == pytest.approx(want["train/tis_clipfrac"], rel=1e-5)
    assert got["custom/pg_loss"] != 0 and "train/tis" not in got
    for name, words in (
        ("weights_of_nothing", r"a tensor of shape \(\d+,\) as weights"),
        ("infinite_weights", "gave 6 tokens a weight that is not finite"),
        ("weights_alone", r"a tuple \(weights, metrics\)"),
    ):
        wrong = AlgoConfig(use_tis=True, custom_tis_function_path=f"{HOOKS}.{name}")
        with pytest.raises(HookError, match=words):
            make_trainer(folder, algo=wrong).train(batch)


def test_the_engines_log_probs_may_be_the_old_ones(sampled, make_trainer):
    folder, batch, log_ratio, _, _ = sampled()
    got = make_trainer(folder, algo=AlgoConfig(use_rollout_logprobs=True)).train(batch)
    weights = batch.loss_weights[batch.loss_mask == 1]
    assert got["train/ratio"] == pytest.approx((weights * np.exp(log_ratio)).sum(), rel=1e-4)


def test_a_rejected_token_with_an_endless_ratio_spoils_no_gradient(sampled, make_trainer):
    folder, batch, _, _, _ = sampled()
    far = batch.rollout_log_probs.copy()
    far[np.flatnonzero(batch.loss_mask)[::7]] = -1e30
    algo = AlgoConfig(use_rs=True, rs_level="token", rs_upper_bound=10.0)
    got = make_trainer(folder, algo=algo).train(replace(batch, rollout_log_probs=far, is_older=True))
    assert 0 < got["train/grad_norm"] < 100 and got["train/rs_rejected"] > 0
