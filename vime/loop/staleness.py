"""Policy versions: what the trainer holds, and how far behind it the samples are that it trains on."""

from __future__ import annotations

from collections.abc import Iterable

from vime.data.versions import trainable_versions
from vime.types import Group, Metrics, PolicyVersion, Sample


def version_after(rollout_id: int) -> PolicyVersion:
    """The policy version of weights trained on rollouts 0 … rollout_id; versions count from 1, of none."""
    return rollout_id + 2


def are_older(samples: Iterable[Sample], version: PolicyVersion, *, any_of_them: bool = False) -> bool:
    """Whether all trainable tokens are of versions before this one; not where no version is known.

    Args: any_of_them: whether one of them is.
    """
    trained = [v for sample in samples for v in trainable_versions(sample)]
    return bool(trained) and (min(trained) if any_of_them else max(trained)) < version


def staleness_metrics(groups: Iterable[Group], version: PolicyVersion) -> Metrics:
    """staleness/mean and /max over samples with a trainable token of a known version; nothing without any.

    Args: version: the policy version that the trainer holds.
    """
    ages = [version - min(trained) for g in groups for s in g.samples if (trained := trainable_versions(s))]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}
