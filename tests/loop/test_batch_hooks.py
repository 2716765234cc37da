"""The contracts of the hooks between rollout and trainer."""

from typing import Any

import numpy as np
import pytest

from tests.fakes import FakeEngines
from tests.loop.test_batch import make, two_groups
from vime.config import AlgoConfig, Config, RewardConfig, RolloutConfig
from vime.errors import HookError
from vime.loop.batch_hooks import BatchHooks
from vime.protocols import RolloutContext
from vime.types import PG_WEIGHTS

HOOKS = "tests.loop.hooks"


def hooks(**settings: Any) -> BatchHooks:
    sections = {
        "rollout": RolloutConfig(
            rollout_max_response_len=8,
            custom_convert_samples_to_train_data_path=settings.get("convert"),
        ),
        "reward": RewardConfig(custom_reward_post_process_path=settings.get("post_process")),
        "algo": AlgoConfig(custom_pg_loss_reducer_function_path=settings.get("reducer")),
    }
    engines = FakeEngines(lambda request, i: ([], "stop"))
    return BatchHooks.load(RolloutContext(Config(**sections), engines, None, reward=None))  # type: ignore[arg-type]


def test_without_hooks_the_batch_is_the_same() -> None:
    plain, _ = make(two_groups())
    hooked, _ = make(two_groups(), hooks=hooks())
    for name in ("tokens", "loss_mask", "rollout_log_probs", "loss_weights", "advantages", "rewards"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(hooked, name))
    assert not hooked.extra


def test_columns_of_ones_own_replace_and_extend_the_usual_ones() -> None:
    batch, _ = make(two_groups(), hooks=hooks(convert=f"{HOOKS}.with_turns"))
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1]
    assert batch.extra["turns"].tolist() == [1, 1, 1, 1]
    assert batch.loss_weights[3] == 1 / 4  # the one token of its trajectory, of 4 trajectories
    for name, words in (
        ("without_tokens", "without_tokens left out the columns tokens"),
        ("too_long", r"gave the column turns the shape \(7,\); 4 samples of 15 tokens need \(4,\) or \(15,\)"),
    ):
        with pytest.raises(HookError, match=words):
            make(two_groups(), hooks=hooks(convert=f"{HOOKS}.{name}"))


def test_post_processed_rewards_are_the_advantages() -> None:
    batch, metrics = make(two_groups(), hooks=hooks(post_process=f"{HOOKS}.squared"))
    assert batch.rewards.tolist() == [1, 0, 2, 2]
    assert batch.advantages.tolist() == [1, 0, 4, 4]
    assert (metrics["rollout/raw_reward"], metrics["rollout/advantages"]) == (1.25, 2.25)
    for name, words in (
        ("one_list", r"returned \[1.0, 1.0, 1.0, 1.0\] \(list\), but a tuple of two lists"),
        (
            "not_numbers",
            r"gave rewards with NaN, infinity or what float32 cannot hold at position 1 \(defined in hooks.py, line",
        ),
    ):
        with pytest.raises(HookError, match=words):
            make(two_groups(), hooks=hooks(post_process=f"{HOOKS}.{name}"))


def test_a_reducer_weights_the_policy_loss_alone() -> None:
    plain, _ = make(two_groups())
    batch, _ = make(two_groups(), hooks=hooks(reducer=f"{HOOKS}.token_sum"))
    np.testing.assert_allclose(batch.extra[PG_WEIGHTS], batch.loss_mask / (4 * 8))
    np.testing.assert_array_equal(batch.loss_weights, plain.loss_weights)
    with pytest.raises(HookError, match="gave weight to tokens under mask 0"):
        make(two_groups(), hooks=hooks(reducer=f"{HOOKS}.weights_prompts"))


def test_a_removed_sample_counts_but_teaches_nothing() -> None:
    groups = two_groups()
    groups[0].samples[0].remove_sample = True
    batch, metrics = make(groups)
    plain, _ = make(two_groups())
    assert batch.loss_mask[:4].tolist() == [0] * 4 and not batch.loss_weights[:4].any()
    np.testing.assert_array_equal(batch.loss_weights[4:], plain.loss_weights[4:])
    np.testing.assert_array_equal(batch.advantages, plain.advantages)
    assert metrics["rollout/masked_ratio"] == 0.25
