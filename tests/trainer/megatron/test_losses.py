"""Policy losses inside the trainer: the numbers of each by hand, on a tiny model."""

from dataclasses import replace

import numpy as np
import pytest

from vime.config import AlgoConfig, CheckpointConfig
from vime.types import METRIC_WEIGHTS, TOKEN_ADVANTAGES

LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]
FAST = {"lr": 0.02, "adam_eps": 1e-2}


def by_hand(kind, log_probs, old, advantages, sample, *, low, high):
    """[P] token losses in float64, and the ratio of each token."""
    log_ratio = log_probs - old
    if kind == "gspo":
        means = np.bincount(sample, log_ratio) / np.bincount(sample)
        log_ratio = means[sample]
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - low, 1 + high)
    loss = {
        "ppo": np.maximum(-advantages * ratio, -advantages * clipped),
        "gspo": np.maximum(-advantages * ratio, -advantages * clipped),
        "cispo": -clipped * advantages * log_probs,
        "reinforce": -advantages * log_probs,
    }[kind]
    return loss, ratio


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_the_second_step_compares_with_the_policy_before_the_first(model_folder, make_trainer, make_batch, kind):
    """loss and ratio of step 2, from the log-probs that a trainer has after step 1 alone."""
    folder, _ = model_folder()
    algo = AlgoConfig(pg_loss_type=kind, eps_clip=0.01, eps_clip_high=0.02)
    batch = make_batch(LENGTHS, micro=2, steps=2)
    taken = [i for rank in batch.steps[1] for micro in rank for i in micro]
    trainer = make_trainer(folder, algo=algo, megatron=FAST)
    old = trainer.log_probs(batch).astype(np.float64)
    both = trainer.train(batch)

    alone = make_batch([LENGTHS[i] for i in range(8) if i not in taken], micro=2)
    keep = np.isin(np.repeat(np.arange(8), batch.lengths), taken, invert=True)
    alone = replace(
        alone,
        **{name: getattr(batch, name)[keep] for name in ("tokens", "loss_mask", "rollout_log_probs", "loss_weights")},
        advantages=batch.advantages[[i for i in range(8) if i not in taken]],
    )
    trainer = make_trainer(folder, algo=algo, megatron=FAST)
    after_first = trainer.train(alone)
    now = trainer.log_probs(batch).astype(np.float64)

    sample = np.repeat(np.arange(8), batch.lengths)
    on = (batch.loss_mask == 1) & np.isin(sample, taken)
    weights = batch.loss_weights[on].astype(np.float64)
    advantages = batch.advantages[sample[on]].astype(np.float64)
    _, index = np.unique(sample[on], return_inverse=True)
    loss, ratio = by_hand(kind, now[on], old[on], advantages, index, low=0.01, high=0.02)
    assert np.abs(ratio - 1).max() > 0.02
    second = {name: 2 * both[f"train/{name}"] - after_first[f"train/{name}"] for name in ("pg_loss", "ratio", "ppo_kl")}
    assert second["pg_loss"] == pytest.approx((weights * loss).sum(), rel=1e-4, abs=1e-5)
    assert second["ratio"] == pytest.approx((weights * ratio).sum(), rel=1e-5)
    assert second["ppo_kl"] == pytest.approx((weights * (old[on] - now[on])).sum(), abs=1e-5)
    if kind == "reinforce":
        assert both["train/pg_clipfrac"] == 0
    else:
        outside = {
            "cispo": (ratio < 0.99) | (ratio > 1.02),
        }.get(kind, ((ratio < 0.99) & (advantages < 0)) | ((ratio > 1.02) & (advantages > 0)))
        assert outside.any()
        assert 2 * both["train/pg_clipfrac"] == pytest.approx((weights * outside).sum(), abs=1e-6)
        low, high = both["train/pg_clipfrac_low"], both["train/pg_clipfrac_high"]
        assert low + high == pytest.approx(both["train/pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_the_unbiased_kl_has_each_tokens_own_ratio(model_folder, make_trainer, make_batch, kind):
    """DeepSeek-V3.2, eq. 7. What an older version sampled has a ratio in the first step already."""
    folder, _ = model_folder()
    other, _ = model_folder(seed=9)
    algo = AlgoConfig(pg_loss_type=kind, use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True)
    batch = make_batch(LENGTHS)
    reference = make_trainer(other).log_probs(batch).astype(np.float64)
    trainer = make_trainer(folder, algo=algo, checkpoint=CheckpointConfig(ref_load=str(other)))
    now = trainer.log_probs(batch).astype(np.float64)
    on = batch.loss_mask == 1
    d, ratio = (now - reference)[on], np.exp((now - batch.rollout_log_probs)[on])
    want = (batch.loss_weights[on] * ratio * (np.exp(-d) - 1 + d)).sum()
    got = trainer.train(replace(batch, is_older=True))
    assert got["train/kl_loss"] == pytest.approx(want, rel=1e-4)


SETTINGS = {
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.01),
    "cispo": dict(advantage_estimator="cispo", eps_clip=0.01),
    "opsm and unbiased kl": dict(
        use_opsm=True, opsm_delta=0.15, use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True, eps_clip_c=1.05
    ),
}


@pytest.mark.parametrize("algo", SETTINGS.values(), ids=SETTINGS)
def test_loss_and_gradient_do_not_depend_on_micro_batches(model_folder, make_trainer, make_batch, algo):
    folder, _ = model_folder()
    results = []
    for micro in (None, 3, 1):
        trainer = make_trainer(folder, algo=AlgoConfig(**algo), megatron=FAST)
        metrics = trainer.train(make_batch(LENGTHS, micro=micro, steps=2))
        results.append({n: v for n, v in metrics.items() if n.startswith("train/")})
    assert results[0]["train/ratio"] != 1
    for got in results[1:]:
        assert got == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in results[0].items()}


def test_opsm_leaves_out_bad_sequences_that_the_engine_would_sample_more(model_folder, make_trainer, make_batch):
    """Against the engine's log-probs, so that it can act in the first step already."""
    folder, _ = model_folder()
    trainer = make_trainer(folder, algo=AlgoConfig(use_opsm=True, opsm_delta=0.3))
    now = trainer.log_probs(make_batch(LENGTHS))
    moved = np.array([0.5, 0.5, 0.2, -0.5, 0.5, 0.0, 0.5, 0.0])
    sampled = now + np.repeat(moved, LENGTHS).astype(np.float32)
    batch = replace(make_batch(LENGTHS, rollout_log_probs=sampled), advantages=np.float32([-1, 1, -1, -1] * 2))
    dropped = (moved > 0.3) & (batch.advantages < 0)
    assert dropped.tolist() == [True, False, False, False, True, False, True, False]
    metrics = trainer.train(batch)
    assert metrics["train/opsm_clipfrac"] == pytest.approx(3 / 8)
    assert metrics["train/pg_loss"] == pytest.approx(-batch.advantages[~dropped].sum() / 8)


def test_kl_in_the_reward_makes_the_advantages(model_folder, make_trainer, make_batch):
    """A_t = (R - mean of the group) - coef (log policy - log reference), whitened over all tokens under mask 1."""
    folder, _ = model_folder()
    other, _ = model_folder(seed=9)
    algo = AlgoConfig(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.3)
    batch = replace(make_batch(LENGTHS), rewards=np.float32([1, 0, 0, 1] * 2), group_ids=np.arange(8) // 4)
    reference = make_trainer(other).log_probs(batch)
    trainer = make_trainer(folder, algo=algo, checkpoint=CheckpointConfig(ref_load=str(other)))
    kl = (trainer.log_probs(batch) - reference).astype(np.float64)
    metrics = trainer.train(batch)
    on = batch.loss_mask == 1
    raw = (np.repeat(batch.rewards - 0.5, LENGTHS) - 0.3 * kl)[on]
    advantages = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    assert metrics["rollout/kl"] == pytest.approx((batch.loss_weights[on] * kl[on]).sum(), rel=1e-4)
    assert metrics["train/pg_loss"] == pytest.approx(-(batch.loss_weights[on] * advantages).sum(), rel=1e-4, abs=1e-5)
    assert metrics["train/kl_loss"] == 0 and "perf/ref_log_probs_time" in metrics
    means = np.bincount(np.repeat(np.arange(8), LENGTHS)[on], advantages) / (np.array(LENGTHS) - 3)
    assert metrics["rollout/advantages/max"] == pytest.approx(means.max(), rel=1e-4)


def test_metrics_are_trajectory_means_whatever_the_aggregation(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    want = make_trainer(folder).train(make_batch(LENGTHS))
    batch = make_batch(LENGTHS)
    constant = (batch.loss_mask / (8 * 100)).astype(np.float32)
    changed = replace(batch, loss_weights=constant, extra={METRIC_WEIGHTS: batch.loss_weights})
    got = make_trainer(folder).train(changed)
    assert got["train/entropy_loss"] == pytest.approx(want["train/entropy_loss"])
    assert got["train/ratio"] == pytest.approx(1)
    lengths = np.array(LENGTHS) - 3
    assert got["train/loss"] == pytest.approx(-(batch.advantages * lengths).sum() / 800, rel=1e-5)


def test_an_advantage_for_each_token_is_read_where_there_is_one(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS)
    per_token = np.arange(len(batch.tokens), dtype=np.float32)
    got = make_trainer(folder).train(replace(batch, extra={TOKEN_ADVANTAGES: per_token}))
    assert got["train/pg_loss"] == pytest.approx(-(batch.loss_weights * per_token).sum(), rel=1e-5)


def test_the_entropy_is_a_bonus_and_the_kl_a_cost(model_folder, make_trainer, make_batch):
    """The loss has them under these signs, and a step without advantages goes the way they say."""
    folder, _ = model_folder()
    other, _ = model_folder(seed=9)
    reference = CheckpointConfig(ref_load=str(other))
    both = AlgoConfig(entropy_coef=0.02, use_kl_loss=True, kl_loss_coef=0.3)
    got = make_trainer(folder, algo=both, checkpoint=reference).train(make_batch(LENGTHS))
    pg, kl, entropy = (got[f"train/{name}"] for name in ("pg_loss", "kl_loss", "entropy_loss"))
    assert kl > 0.01 and entropy > 1
    assert got["train/loss"] == pytest.approx(pg + 0.3 * kl - 0.02 * entropy, rel=1e-5)

    batch = make_batch(LENGTHS)
    batch.advantages[:] = 0
    for algo, name, sign in (
        (AlgoConfig(entropy_coef=1.0), "entropy_loss", 1),
        (AlgoConfig(use_kl_loss=True, kl_loss_coef=1.0), "kl_loss", -1),
    ):
        trainer = make_trainer(folder, algo=algo, checkpoint=reference)
        first, second = (trainer.train(batch)[f"train/{name}"] for _ in range(2))
        assert sign * (second - first) > 1e-3, name
