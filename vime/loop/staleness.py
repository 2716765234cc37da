"""Policy versions: what the trainer holds, and how far behind it the samples are that it trains on."""

from __future__ import annotations

from collections.abc import Iterable

from vime.types import Group, Metrics, PolicyVersion, Sample


def version_after(rollout_id: int) -> PolicyVersion:
    """The policy version of weights trained on rollouts 0 … rollout_id; versions count from 1, of none."""
    return rollout_id + 2


def are_older(samples: Iterable[Sample], version: PolicyVersion) -> bool:
    """Whether all trainable tokens are of versions before this one; not where no version is known."""
    trained = [v for sample in samples for v in _trainable_versions(sample)]
    return bool(trained) and max(trained) < version


def staleness_metrics(groups: Iterable[Group], version: PolicyVersion) -> Metrics:
    """staleness/mean and /max over samples with a trainable token of a known version; nothing without any.

    Args: version: the policy version that the trainer holds.
    """
    ages = [version - min(trained) for g in groups for s in g.samples if (trained := _trainable_versions(s))]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def _trainable_versions(sample: Sample) -> list[PolicyVersion]:
    """Of the spans that hold a token under mask 1."""
    mask = bytes(sample.loss_mask)  # millions of entries: bytes search fast
    return [span.version for span in sample.weight_versions if mask.find(1, span.start, span.end) >= 0]
