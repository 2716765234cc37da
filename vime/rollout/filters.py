"""Filters: which finished groups are worth training on (a dropped one is replaced), and which samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.protocols import RolloutContext
from vime.rewards.score import scalar_reward
from vime.types import Group, Sample, SampleStatus


@dataclass(frozen=True, slots=True)
class FilterOutput:
    """What a filter says of a group; the reason names the metric rollout/dynamic_filter/drop_<reason>."""

    keep: bool
    reason: str = "filtered"


def check_reward_nonzero_std(config: RolloutContext, samples: Sequence[Sample]) -> FilterOutput:
    """Keep a group whose rewards differ: with equal ones every advantage is 0 and it teaches nothing.

    Source: dynamic sampling of DAPO, arXiv:2503.14476.
    """
    key = config.config.reward.reward_key
    rewards = [scalar_reward(sample.reward, key) for sample in samples]
    if max(rewards) > min(rewards):
        return FilterOutput(True)
    return FilterOutput(False, f"zero_std_{reward_name(rewards[0])}")


def remove_truncated(config: RolloutContext, groups: Sequence[Group]) -> None:
    """Learn nothing from responses that a length limit cut off; they stay in their group's statistics.

    For --rollout-sample-filter-path. Source: overlong filtering of DAPO, arXiv:2503.14476.
    """
    for sample in (sample for group in groups for sample in group.samples):
        sample.remove_sample = sample.remove_sample or sample.status is SampleStatus.TRUNCATED


def reward_name(reward: float) -> str:
    """A reward as part of a metric's name: one decimal, so that near values share a name."""
    return f"{round(reward, 1) + 0.0:g}"
