"""What a rollout reports of the samples it generated. Definitions: vime/observability/metrics.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.rewards.grade import VERDICTS
from vime.rewards.score import VERDICT_KEY, scalar_reward
from vime.rollout.filters import reward_name
from vime.types import Group, Metrics, Sample, SampleStatus

# Verdicts worth a metric of their own: the others are the reward itself.
_REPORTED_VERDICTS = tuple(v for v in VERDICTS if v not in ("correct", "wrong"))


class RolloutStats:
    """Counts over all groups that finished, kept, dropped or failed; groups put back are not among them."""

    def __init__(self, reward_key: str | None) -> None:
        self._reward_key = reward_key
        self._response_lens: list[int] = []
        self._prompt_lens: list[int] = []
        self._rewards: list[float] = []
        self._statuses: Counter[SampleStatus] = Counter()
        self._verdicts: Counter[str] = Counter()
        self._entries: dict[str, list[float]] = {}
        self._counts: Counter[str] = Counter()
        self._begun: dict[int, int] = {}  # tokens that a group brought from earlier rollouts

    def add(self, samples: Sequence[Sample]) -> None:
        """One finished group's samples."""
        self._counts["rollout/num_groups"] += 1
        self._counts["rollout/num_samples"] += len(samples)
        for sample in samples:
            self._response_lens.append(sample.response_length)
            self._prompt_lens.append(len(sample.tokens) - sample.response_length)
            self._statuses[sample.status] += 1
            self._verdicts[sample.metadata.get(VERDICT_KEY, "")] += 1
        if any(sample.status is SampleStatus.FAILED for sample in samples):
            return
        _add_entries(self._entries, samples)
        rewards = [scalar_reward(sample.reward, self._reward_key) for sample in samples]
        self._rewards += rewards
        if max(rewards) == min(rewards):
            self._counts[f"rollout/zero_std/count_{reward_name(rewards[0])}"] += 1

    def start(self, group: Group) -> None:
        """A group begins; with tokens, it is gone on with."""
        if group.is_finished:
            self._counts["rollout/num_reused_groups"] += 1
            return
        self._begun[group.group_id] = sum(sample.response_length for sample in group.samples)
        self._counts["rollout/num_continued_groups"] += self._begun[group.group_id] > 0

    def keep(self, groups: Sequence[Group]) -> None:
        """The groups that are trained on."""
        self._counts["rollout/num_offpolicy_tokens"] += sum(self._begun.get(group.group_id, 0) for group in groups)

    def put_back(self, groups: Sequence[Group]) -> None:
        """The surplus at the end."""
        tokens = sum(sample.response_length for group in groups for sample in group.samples)
        self._counts["rollout/num_put_back"] += len(groups)
        self._counts["rollout/num_put_back_tokens"] += tokens

    def count(self, name: str, by: int = 1) -> None:
        """Raise the metric `name` by a number; a metric never counted is 0 only if it was counted by 0."""
        self._counts[name] += by

    def metrics(self) -> Metrics:
        """All of it; ratios are over generated samples."""
        total = max(len(self._response_lens), 1)
        metrics: Metrics = {name: float(value) for name, value in self._counts.items()}
        metrics |= length_metrics("rollout/response_len", self._response_lens)
        metrics |= length_metrics("rollout/prompt_len", self._prompt_lens)
        metrics["rollout/num_tokens"] = float(sum(self._response_lens))
        for name, status in (
            ("truncated_ratio", SampleStatus.TRUNCATED),
            ("failed_ratio", SampleStatus.FAILED),
        ):
            metrics[f"rollout/{name}"] = self._statuses[status] / total
        metrics |= {f"rollout/reward_{v}": self._verdicts[v] / total for v in _REPORTED_VERDICTS}
        if self._rewards:
            metrics["rollout/generated_reward"] = float(np.mean(self._rewards))
        metrics |= {f"rollout/reward/{name}": float(np.mean(values)) for name, values in self._entries.items()}
        return metrics


def trajectory_rewards(group: Group, key: str | None) -> list[float]:
    """One reward per trajectory of the group, the mean over its siblings; a failed sample counts as 0.

    Args: key: the entry of a dict reward that counts. Raises: RewardError for a sample without a number.
    """
    found: dict[int, list[float]] = {}
    for sample in group.samples:
        reward = 0.0 if sample.status is SampleStatus.FAILED else scalar_reward(sample.reward, key)
        found.setdefault(sample.trajectory_id, []).append(reward)
    return [sum(rewards) / len(rewards) for rewards in found.values()]


def pass_rates(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """k -> pass@k, the mean over prompts, for k = 1, 2, 4, … up to the fewest samples of one; nothing for one each.

    Args: rewards: of each prompt's samples; 1 and above is correct. Source: arXiv:2107.03374, eq. 1.
    """
    fewest, k = min(map(len, rewards)), 1
    rates: dict[int, float] = {}
    while fewest > 1 and k <= fewest:
        each = [pass_at_k(len(of_prompt), sum(r >= 1 for r in of_prompt), k) for of_prompt in rewards]
        rates[k] = sum(each) / len(each)
        k *= 2
    return rates


def pass_at_k(n: int, num_correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the correct ones."""
    return 1.0 - math.comb(n - num_correct, k) / math.comb(n, k)


def verdict_ratios(prefix: str, samples: Sequence[Sample]) -> Metrics:
    """Shares of samples whose grading ended without a judgement, by verdict, under prefix + verdict."""
    counts = Counter(sample.metadata.get(VERDICT_KEY, "") for sample in samples)
    return {f"{prefix}{v}": counts[v] / max(len(samples), 1) for v in _REPORTED_VERDICTS}


def reward_entries(prefix: str, samples: Sequence[Sample]) -> Metrics:
    """Means of the entries of dict rewards, under prefix + entry, over the samples that have them."""
    entries: dict[str, list[float]] = {}
    _add_entries(entries, samples)
    return {f"{prefix}{name}": float(np.mean(values)) for name, values in entries.items()}


def _add_entries(entries: dict[str, list[float]], samples: Sequence[Sample]) -> None:
    for sample in samples:
        for name, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            entries.setdefault(name, []).append(value)


def length_metrics(name: str, lengths: Sequence[float]) -> Metrics:
    """mean, median, min and max under `name`/; nothing for no lengths."""
    if not lengths:
        return {}
    column: npt.NDArray[np.float64] = np.asarray(lengths, np.float64)
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/median": float(np.median(column)),
        f"{name}/min": float(column.min()),
        f"{name}/max": float(column.max()),
    }
