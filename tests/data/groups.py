"""Groups as rollouts make them, for tests of the journal."""

from __future__ import annotations

from vime.types import Group, Sample, SampleStatus


def pending(group_id: int, *, n: int = 2, place: tuple[int, int] | None = None) -> Group:
    """As the data source hands it out."""
    samples = [
        Sample(
            prompt=f"prompt {group_id}",
            tokens=(group_id, 7),
            label=str(group_id),
            metadata={"row": group_id},
            group_id=group_id,
            sample_id=group_id * n + k,
            trajectory_id=group_id * n + k,
        )
        for k in range(n)
    ]
    return Group(group_id, samples, place=place or (0, group_id))


def generate(group: Group, *, version: int = 1, tokens: int = 3) -> Group:
    """The same group with responses and rewards, sampled by this policy version."""
    for k, sample in enumerate(group.samples):
        sample.append_response(tuple(range(1, tokens + 1)), [-0.1 * (k + 1) / 3] * tokens, version=version)
        sample.status, sample.reward, sample.response = SampleStatus.COMPLETED, float(k), "text"
    return group


def finished(group_id: int, *, version: int = 1, n: int = 2) -> Group:
    """Generated and rewarded."""
    return generate(pending(group_id, n=n), version=version)
