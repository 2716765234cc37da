"""The age of samples in policy versions."""

import math
from collections.abc import Sequence

from vime.loop.staleness import are_older, staleness_metrics, version_after
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


def test_samples_are_older_where_no_trainable_token_is_of_the_trainers_own_version() -> None:
    assert (version_after(-1), version_after(4)) == (1, 6)
    old = sample(0, [0, 1, 1], VersionSpan(5, 0, 1), VersionSpan(3, 1, 2), VersionSpan(4, 2, 3))
    assert are_older([old], version=5), "a masked token does not count"
    assert not are_older([old, sample(1, [1], VersionSpan(5, 0, 1))], version=5)
    assert not are_older([sample(0, [1])], version=5), "nobody said who wrote it"
