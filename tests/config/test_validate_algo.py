"""The algorithm's cross-checks: what a name stands for, and what does not go together."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_validate import changed, problems
from vime.config import AlgoConfig, Config
from vime.config.estimators import kl_type, loss_agg_mode, needs_reference, pg_loss_type, whitens


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"advantage_estimator": "gspo", "pg_loss_type": "ppo"},
            "--pg-loss-type is ppo, but --advantage-estimator gspo is GRPO's advantage with the gspo loss",
        ),
        ({"advantage_estimator": "cispo", "pg_loss_type": "gspo"}, "--pg-loss-type is gspo, but"),
        (
            {"advantage_estimator": "dr_grpo", "loss_agg_mode": "token-mean"},
            "--loss-agg-mode is token-mean, but --advantage-estimator dr_grpo divides by a constant length",
        ),
        ({"advantage_estimator": "dr_grpo", "calculate_per_token_loss": True}, "--loss-agg-mode is token-mean, but"),
        (
            {"calculate_per_token_loss": True, "loss_agg_mode": "seq-mean-token-sum"},
            "--calculate-per-token-loss is --loss-agg-mode token-mean, but that is seq-mean-token-sum",
        ),
        ({"advantage_estimator": "gspo", "eps_clip": 1.0}, "--eps-clip is 1.0, an offset from 1 that must be below 1"),
        ({"advantage_estimator": "cispo", "eps_clip": 1.5}, "with cispo 1 is no lower bound"),
        ({"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}, "it would count twice"),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True, "kl_loss_type": "k2"},
            "no ratio makes k2 an unbiased estimate",
        ),
        (
            {"advantage_estimator": "rloo", "disable_rewards_normalization": True},
            "leaves nothing of --advantage-estimator rloo",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "disable_rewards_normalization": True},
            "leaves nothing of --advantage-estimator reinforce_plus_plus",
        ),
        ({"overlong_buffer_len": 9}, "--overlong-buffer-len is 9, more than the 8 tokens"),
        ({"overlong_penalty_factor": -1.0}, "--overlong-penalty-factor is -1.0, but must be at least 0"),
        ({"gamma": 1.5}, "--gamma is 1.5, but may be at most 1"),
        ({"use_tis": True, "tis_clip_low": 3.0}, "--tis-clip-low is 3.0, more than --tis-clip 2.0"),
        ({"use_tis": True, "tis_clip": 0.0}, "--tis-clip is 0.0, but must be above 0"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "--use-tis corrects for the engine's log-probs and"),
        ({"use_rs": True}, "--use-rs rejects nothing without --rs-lower-bound"),
        ({"use_rs": True, "rs_lower_bound": 2.0, "rs_upper_bound": 0.5}, "--rs-lower-bound is 2.0, more than"),
        (
            {"use_rs": True, "rs_veto_threshold": 1e-4, "rejected_tokens": "removed"}
            | {"custom_pg_loss_reducer_function_path": "tests.loop.hooks.token_sum"},
            "--rejected-tokens removed makes the weights of the tokens that are left anew",
        ),
        (
            {"use_tis": True, "custom_tis_function_path": "tests.trainer.megatron.hooks.geometric_weights"}
            | {"use_rs": True, "rs_upper_bound": 2.0, "rejected_tokens": "removed"},
            "--custom-tis-function-path weights them micro-batch by micro-batch",
        ),
        ({"kl_coef": -0.1}, "--kl-coef is -0.1, but must be at least 0"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(
    right: Config,
    change: dict[str, Any],
    sentence: str,
) -> None:
    found = problems(changed(right, **{f"algo__{name}": value for name, value in change.items()}))
    assert len(found) == 1 and sentence in found[0], found


@pytest.mark.parametrize("name", ["rloo", "gspo", "cispo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_one_sample_a_prompt_needs_an_estimator_that_does_not_compare(right: Config, name: str) -> None:
    alone = changed(right, rollout__n_samples_per_prompt=1)
    (found,) = problems(changed(alone, algo__advantage_estimator=name))
    assert "a group of one has advantage 0" in found
    alone = changed(alone, algo__advantage_estimator="reinforce_plus_plus")
    assert problems(alone) == []
    path = "vime.rollout.filters.check_reward_nonzero_std"
    (found,) = problems(changed(alone, rollout__dynamic_sampling_filter_path=path))
    assert "with --n-samples-per-prompt 1 every group is one" in found


@pytest.mark.parametrize(
    "change",
    [
        {"advantage_estimator": "gspo", "pg_loss_type": "gspo"},
        {"advantage_estimator": "rloo", "pg_loss_type": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
        {"advantage_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm"},
        {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.01, "gamma": 0.99},
        {"calculate_per_token_loss": True, "loss_agg_mode": "token-mean", "eps_clip_high": 0.28},
        {"overlong_buffer_len": 8, "use_opsm": True, "normalize_advantages": True},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
        {"use_tis": True, "tis_mode": "mask", "tis_clip": 5.0, "tis_clip_low": 0.5, "rejected_tokens": "removed"},
        {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.999, "rs_upper_bound": 1.001},
        {"use_tis": True, "tis_clip": math.inf, "use_rs": True, "rs_veto_threshold": 1e-4, "pg_loss_type": "gspo"},
    ],
)
def test_what_goes_together_passes(right: Config, change: dict[str, Any]) -> None:
    config = changed(right, **{f"algo__{name}": value for name, value in change.items()})
    assert problems(config, explicit=frozenset(f"algo.{name}" for name in change)) == []


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        ({}, "kl_loss_type", "add --use-kl-loss, or --kl-coef"),
        ({}, "use_unbiased_kl", "add --use-kl-loss"),
        ({}, "opsm_delta", "add --use-opsm"),
        ({}, "tis_clip", "add --use-tis"),
        ({}, "custom_tis_function_path", "add --use-tis"),
        ({}, "rs_level", "add --use-rs"),
        ({"use_rs": True, "rs_veto_threshold": 1e-4}, "rs_level", "give one of them"),
        ({"use_tis": True}, "rejected_tokens", "nothing is rejected"),
        (
            {"use_tis": True, "custom_tis_function_path": "tests.trainer.megatron.hooks.geometric_weights"},
            "tis_mode",
            "makes the weights",
        ),
        ({}, "overlong_penalty_factor", "add --overlong-buffer-len"),
        ({}, "loss_agg_length", "add --loss-agg-mode seq-mean-token-sum-norm"),
        ({}, "gamma", "reinforce_plus_plus discounts"),
        ({"advantage_estimator": "rloo"}, "disable_grpo_std_normalization", "does not divide by a group's std"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "normalize_advantages", "part of the estimator"),
        ({"pg_loss_type": "reinforce"}, "eps_clip", "clips nothing"),
        ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "eps_clip_c", "clips weights, not the update"),
    ],
)
def test_what_nobody_reads_is_a_problem(right: Config, change: dict[str, Any], key: str, remedy: str) -> None:
    config = changed(right, **{f"algo__{name}": value for name, value in change.items()})
    (found,) = problems(config, explicit=frozenset({f"algo.{key}"}))
    assert "nothing reads it" in found and remedy in found


def test_a_penalty_by_length_needs_rows_that_are_samples(right: Config, tmp_path: Path) -> None:
    own = "tests.loop.hooks.with_turns"
    config = changed(right, algo__overlong_buffer_len=4, rollout__custom_convert_samples_to_train_data_path=own)
    assert any("--overlong-buffer-len goes by the length of samples" in p for p in problems(config))


def test_a_name_stands_for_a_loss_and_an_aggregation() -> None:
    for name, loss, mode in (
        ("grpo", "ppo", "trajectory-mean"),
        ("dr_grpo", "ppo", "seq-mean-token-sum-norm"),
        ("gspo", "gspo", "trajectory-mean"),
        ("cispo", "cispo", "trajectory-mean"),
        ("rloo", "ppo", "trajectory-mean"),
    ):
        algo = AlgoConfig(advantage_estimator=name)
        assert (pg_loss_type(algo), loss_agg_mode(algo), whitens(algo)) == (loss, mode, False)
    assert whitens(AlgoConfig(advantage_estimator="reinforce_plus_plus"))
    assert loss_agg_mode(AlgoConfig(calculate_per_token_loss=True)) == "token-mean"


def test_the_kl_is_k1_in_the_reward_and_k3_in_the_loss() -> None:
    assert kl_type(AlgoConfig(kl_coef=0.1)) == "k1" and kl_type(AlgoConfig(use_kl_loss=True)) == "k3"
    assert kl_type(AlgoConfig(kl_coef=0.1, kl_loss_type="k2")) == "k2"
    assert needs_reference(AlgoConfig(kl_coef=0.1)) and not needs_reference(AlgoConfig())
