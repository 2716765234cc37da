"""Filters of groups and of samples."""

from __future__ import annotations

from typing import Any

import pytest

from vime.config import Config, RewardConfig
from vime.errors import RewardError
from vime.protocols import RolloutContext
from vime.rollout.filters import FilterOutput, check_reward_nonzero_std, remove_truncated, reward_name
from vime.types import Group, Sample, SampleStatus


def judge(rewards: list[Any], key: str | None = None) -> FilterOutput:
    config = Config(reward=RewardConfig(reward_key=key))
    context = RolloutContext(config, engines=None, tokenizer=None, reward=None)  # type: ignore[arg-type]
    return check_reward_nonzero_std(context, [Sample(reward=reward) for reward in rewards])


def test_groups_whose_rewards_differ_are_kept() -> None:
    assert judge([0.0, 1.0]).keep
    assert judge([0.1, 0.1 + 1e-12]).keep


def test_groups_of_one_reward_are_dropped_by_its_name() -> None:
    assert judge([0.0, 0.0]) == FilterOutput(False, "zero_std_0")
    assert judge([0.5]) == FilterOutput(False, "zero_std_0.5")


def test_the_reward_key_chooses_the_entry() -> None:
    rewards = [{"acc": 1.0, "len": 2.0}, {"acc": 1.0, "len": 3.0}]
    assert not judge(rewards, "acc").keep
    assert judge(rewards, "len").keep
    with pytest.raises(RewardError):
        judge(rewards)


def test_reward_names_have_one_decimal_and_no_negative_zero() -> None:
    assert [reward_name(r) for r in (1.0, 0.96, -0.01, -1.25, 10.0)] == ["1", "1", "0", "-1.2", "10"]


def test_truncated_samples_stay_in_their_group_without_a_gradient() -> None:
    context = RolloutContext(Config(), engines=None, tokenizer=None, reward=None)  # type: ignore[arg-type]
    statuses = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.COMPLETED)
    samples = [Sample(status=status, group_id=0, sample_id=i) for i, status in enumerate(statuses)]
    samples[2].remove_sample = True  # by an earlier filter
    remove_truncated(context, [Group(0, samples)])
    assert [s.remove_sample for s in samples] == [False, True, True]
