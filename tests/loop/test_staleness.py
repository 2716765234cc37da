"""The age of samples in policy versions."""

import math
from collections.abc import Sequence

from vime.loop.staleness import staleness_metrics
from vime.types import Group, Sample, VersionSpan


def sample(number: int, mask: Sequence[int], *versions: VersionSpan) -> Sample:
    return Sample(
        tokens=(1, *range(len(mask))),
        response_length=len(mask),
        loss_mask=list(mask),
        rollout_log_probs=[-1.0 if m else math.nan for m in mask],
        weight_versions=list(versions),
        group_id=number,
        sample_id=number,
        trajectory_id=number,
    )


def test_the_age_is_that_of_the_oldest_trainable_token() -> None:
    old = sample(0, [0, 1, 1], VersionSpan(1, 0, 1), VersionSpan(3, 1, 2), VersionSpan(5, 2, 3))
    new = sample(1, [1], VersionSpan(5, 0, 1))
    metrics = staleness_metrics([Group(0, [old]), Group(1, [new])], version=5)
    assert metrics == {"staleness/mean": 1.0, "staleness/max": 2.0}, "version 1 wrote a masked token alone"


def test_samples_that_no_policy_wrote_have_no_age() -> None:
    masked = sample(1, [0], VersionSpan(1, 0, 1))
    assert staleness_metrics([Group(0, [sample(0, [1])]), Group(1, [masked])], version=5) == {}
