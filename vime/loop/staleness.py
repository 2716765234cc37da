"""How far behind the trainer the samples are that it trains on."""

from __future__ import annotations

from collections.abc import Iterable

from vime.types import Group, Metrics, PolicyVersion, Sample


def staleness_metrics(groups: Iterable[Group], version: PolicyVersion) -> Metrics:
    """staleness/mean and /max over samples with a trainable token of a known version; nothing without any.

    Args: version: the policy version that the trainer holds.
    """
    ages = [
        version - oldest
        for group in groups
        for sample in group.samples
        if (oldest := oldest_trainable_version(sample)) is not None
    ]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def oldest_trainable_version(sample: Sample) -> PolicyVersion | None:
    """The version of the sample's oldest token under mask 1; None where nothing of it is trained on."""
    mask = bytes(sample.loss_mask)  # millions of entries: bytes search fast
    trained = [span.version for span in sample.weight_versions if mask.find(1, span.start, span.end) >= 0]
    return min(trained, default=None)
