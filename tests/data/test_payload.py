"""Groups as bytes."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from tests.data.groups import finished, pending
from vime.data.payload import group_from_bytes, group_to_bytes
from vime.types import Group, RoutedRows, Sample, SampleStatus, SamplingSupport


def test_every_field_of_every_sample_comes_back() -> None:
    sample = Sample(prompt=[{"role": "user", "content": "é"}], tokens=(1, 2), group_id=5, sample_id=8, trajectory_id=9)
    sample.append_response(
        (3, 4),
        (-0.1, -1 / 3),
        version=7,
        support=SamplingSupport.of([[3, 8], [4]]),
        routed_experts=RoutedRows(0, np.ones((3, 2, 1), np.uint8)),
    )
    sample.append_response((6,), trainable=False)
    sample.response, sample.reward, sample.label = "text", {"score": 0.5}, {"answer": [1]}
    sample.status, sample.remove_sample = SampleStatus.TRUNCATED, True
    sample.metadata, sample.trace = {"row": 1}, [{"name": "generate", "start_s": 1.5, "end_s": 2.5}]
    sample.teacher_log_probs = [-0.5, -0.25, 0.0]
    sibling = Sample(tokens=(1, 2, 9), group_id=5, sample_id=10, trajectory_id=9, metadata={"row": 2})
    back = group_from_bytes(group_to_bytes(Group(5, [sample, sibling], place=(2, 17))))
    assert (back.group_id, back.place, len(back.samples)) == (5, (2, 17), 2)
    for found, expected in zip(back.samples, (sample, sibling), strict=True):
        for name in (field.name for field in fields(Sample)):
            a, b = getattr(found, name), getattr(expected, name)
            if name == "routed_experts":
                assert (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and (a == b).all()))
            elif name == "support":
                assert (a and a.rows()) == (b and b.rows())
            elif name == "rollout_log_probs":
                assert [x for x in a if not math.isnan(x)] == [x for x in b if not math.isnan(x)] and len(a) == len(b)
            else:
                assert a == b, name
    assert pending(3) == group_from_bytes(group_to_bytes(pending(3)))


def test_siblings_share_what_is_written_but_not_what_is_read() -> None:
    long = finished(1, n=8)
    for sample in long.samples:
        sample.prompt = "a long prompt " * 1000
    data = group_to_bytes(long)
    assert len(data) < 2 * len(long.samples[0].prompt)
    back = group_from_bytes(data)
    back.samples[0].metadata["mine"] = True
    assert "mine" not in back.samples[1].metadata


def test_what_json_cannot_hold_is_refused_and_damaged_bytes_are() -> None:
    group = finished(1)
    group.samples[0].metadata["object"] = object()
    with pytest.raises(TypeError, match="not JSON serializable"):
        group_to_bytes(group)
    with pytest.raises(ValueError, match="0 bytes hold no group"):
        group_from_bytes(b"")
    with pytest.raises(ValueError, match="end before"):
        group_from_bytes(group_to_bytes(finished(1))[:-3])
