"""What the groups that are trained on say of the rollout, whichever function made them. Definitions: metrics.py."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from vime.errors import RewardError
from vime.observability.trace import OWN_SPANS, seconds_outside_generation
from vime.rewards.score import scalar_reward
from vime.rollout.stats import length_metrics, pass_rates, trajectory_rewards
from vime.types import Group, Metrics, Sample

_REPETITION_CHARACTERS = 10_000  # the end of a response, where a loop would be
_REPETITION_RATIO = 10.0
_SHORTEST_BYTES = 200  # zlib's own overhead keeps anything shorter from a ratio of 10


def sample_metrics(
    groups: Sequence[Group],
    *,
    begin_s: float,
    seconds: float,
    num_devices: int,
    reward_key: str | None,
) -> Metrics:
    """Metrics of a rollout's groups.

    Args:
        begin_s: when the rollout began, Unix time; a sample may have spans of earlier ones.
        seconds: the rollout took.
        num_devices: of the engines.
        reward_key: the entry of a dict reward that is trained on.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    masks = [bytes(sample.loss_mask) for sample in samples]  # millions of entries: bytes count and search fast
    trainable = [mask.count(1) for mask in masks]
    metrics: Metrics = {
        "rollout/repetition_frac": sum(is_repetitive(s.response) for s in samples) / len(samples),
        "perf/effective_tokens_per_gpu_per_sec": sum(trainable) / (seconds * num_devices),
    }
    metrics |= _parts(samples) | _speed(samples, begin_s, seconds) | _turns(masks, trainable)
    return metrics | _pass_rate(groups, reward_key)


def is_repetitive(text: str) -> bool:
    """Whether zlib makes the end of a text more than ten times shorter: it says the same thing over and over."""
    data = text[-_REPETITION_CHARACTERS:].encode("utf-8", "replace")
    return len(data) >= _SHORTEST_BYTES and len(data) > _REPETITION_RATIO * len(zlib.compress(data, level=1))


def num_turns(loss_mask: bytes) -> int:
    """How many times the policy had the word: runs of mask 1."""
    return len(loss_mask.replace(b"\0", b" ").split())


def _parts(samples: Sequence[Sample]) -> Metrics:
    """How long the samples were in each of vime's own spans."""
    seconds: dict[str, list[float]] = {}
    for sample in samples:
        of_sample: dict[str, float] = {}
        for span in sample.trace:
            if span["name"] in OWN_SPANS:
                of_sample[span["name"]] = of_sample.get(span["name"], 0.0) + span["end_s"] - span["start_s"]
        for name, value in of_sample.items():
            seconds.setdefault(name, []).append(value)
    return {
        name: value
        for part, values in seconds.items()
        for name, value in length_metrics(f"perf/sample_seconds/{part}", values).items()
    }


def _speed(samples: Sequence[Sample], begin_s: float, seconds: float) -> Metrics:
    longest = max(samples, key=lambda s: s.response_length)
    outside = [seconds_outside_generation(s.trace) for s in samples]
    metrics: Metrics = {"perf/longest_sample_tokens_per_sec": longest.response_length / seconds}
    if not any(outside):
        return metrics
    metrics |= length_metrics("perf/non_generation_time", outside)
    if (rest := seconds - seconds_outside_generation(longest.trace, since_s=begin_s)) > 0:
        metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] = longest.response_length / rest
    return metrics


def _turns(masks: Sequence[bytes], trainable: Sequence[int]) -> Metrics:
    """Nothing where nobody but the policy wrote into a response."""
    lengths = list(map(len, masks))
    if lengths == list(trainable):
        return {}
    return {
        **length_metrics("multi_turn/round_number", list(map(num_turns, masks))),
        **length_metrics("multi_turn/raw_response_length", lengths),
        **length_metrics("multi_turn/wo_obs_response_length", trainable),
    }


def _pass_rate(groups: Sequence[Group], reward_key: str | None) -> Metrics:
    try:
        rewards = [trajectory_rewards(group, reward_key) for group in groups]
        lengths = [s.response_length for g in groups for s in g.samples if scalar_reward(s.reward, reward_key) >= 1]
    except RewardError:  # supervised data, or a rollout function of the user's that leaves rewards to the batch
        return {}
    metrics = length_metrics("rollout/correct_length", lengths)
    if all(reward in (0.0, 1.0) for of_group in rewards for reward in of_group):
        metrics |= {f"passrate/pass@{k}": rate for k, rate in pass_rates(rewards).items()}
    return metrics
