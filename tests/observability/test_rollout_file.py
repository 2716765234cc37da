"""A rollout written and read again is the same rollout, to the last bit."""

import dataclasses
import math
import struct

import numpy as np
import pytest

from vime.errors import DataError
from vime.observability.rollout_file import read_rollout, write_rollout
from vime.types import Group, RoutedRows, Sample, SampleStatus, SamplingSupport, VersionSpan


def bits(values):
    return [struct.pack("<d", v) for v in values]


def assert_same(got: Sample, want: Sample) -> None:
    for field in dataclasses.fields(Sample):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if field.name == "rollout_log_probs":
            assert bits(a) == bits(b)
        elif field.name == "routed_experts" and b is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif field.name == "support" and b is not None:
            assert a.rows() == b.rows() and a.ids.dtype == b.ids.dtype
        else:
            assert type(a) is type(b) and a == b, field.name


def sampled(log_probs, narrow=False, **more):
    s = Sample(tokens=(1, 2), group_id=4, sample_id=8, trajectory_id=7, status=SampleStatus.COMPLETED, **more)
    n = len(log_probs)
    support = SamplingSupport.of([[10 + i, 3] for i in range(n)]) if narrow else None
    spans = [VersionSpan(3, 0, 1), VersionSpan(4, 1, n)]
    s.append_response(range(10, 10 + n), log_probs, version=spans, support=support)
    s.append_response((7,), trainable=False)
    return s


def through_a_file(tmp_path, groups):
    write_rollout(tmp_path / "r.parquet", 12, groups)
    return read_rollout(tmp_path / "r.parquet")


@pytest.mark.parametrize("log_probs", [[float(np.float32(-0.1)), -0.0, -1e-42], [-0.1, -math.pi, -1e-310], [-1e300, 0]])
def test_every_field_comes_back_exactly(tmp_path, log_probs):
    first = sampled(
        log_probs,
        narrow=True,
        prompt="1+1=",
        response="2\ud83d",
        label="2",
        reward={"right": 1.0, "style": 0.1},
        metadata={"level": 3, "nested": {"é": [1, None, 0.1]}, "\udc00": "x"},
        trace=[{"name": "generate", "start_s": 0.1, "end_s": 2.5}],
    )
    routed = np.arange((len(first.tokens) - 1) * 2 * 2, dtype=np.uint16).reshape(-1, 2, 2)
    first.append_response((), routed_experts=RoutedRows(0, routed), trainable=False)
    chat = Sample(
        prompt=[{"role": "user", "content": "hi"}],
        group_id=4,
        sample_id=9,
        trajectory_id=9,
        label=[1, "x"],
        reward=math.pi,
        status=SampleStatus.FAILED,
    )
    odd = Sample(prompt="[1]", label=5, group_id=2, sample_id=1, trajectory_id=0, remove_sample=True)
    taught = Sample(tokens=(1,), group_id=3, sample_id=2, trajectory_id=1, label='"quoted"')
    taught.append_response((5, 6), supervised=True)
    wanted = [Group(4, [first, chat]), Group(2, [odd]), Group(3, [taught])]
    got = through_a_file(tmp_path, wanted)
    assert [g.group_id for g in got] == [4, 2, 3]
    for a, b in zip(got, wanted, strict=True):
        assert len(a.samples) == len(b.samples)
        for x, y in zip(a.samples, b.samples, strict=True):
            assert_same(x, y)


def test_the_reward_column_holds_the_number_that_counts(tmp_path):
    import pandas as pd

    samples = [Sample(group_id=0, sample_id=i, reward=r) for i, r in enumerate([{"acc": 1.0, "len": 0.5}, 2.0, None])]
    write_rollout(tmp_path / "r.parquet", 0, [Group(0, samples)], "acc")
    frame = pd.read_parquet(tmp_path / "r.parquet")
    assert frame.reward[:2].tolist() == [1.0, 2.0] and math.isnan(frame.reward[2])
    assert [s.reward for s in read_rollout(tmp_path / "r.parquet")[0].samples] == [s.reward for s in samples]


def test_numbers_of_numpy_stay_numbers_and_unknown_objects_become_their_text(tmp_path):
    (group,) = through_a_file(
        tmp_path, [Group(0, [Sample(group_id=0, metadata={"a": np.float32(0.5), "b": np.arange(2), "c": 1j})])]
    )
    assert group.samples[0].metadata == {"a": 0.5, "b": [0, 1], "c": "1j"}


def test_metadata_that_json_refuses_is_written_all_the_same(tmp_path):
    within: dict[str, object] = {"ok": 1, ("a", 2): 3, "long": 10**5000}
    within["self"] = within
    (group,) = through_a_file(tmp_path, [Group(0, [Sample(group_id=0, metadata=within)])])
    read = group.samples[0].metadata
    assert (read["ok"], read["('a', 2)"], read["long"]) == (1, 3, "<int>") and read["self"]["ok"] == 1


def test_log_probs_take_float32_where_that_is_exact(tmp_path):
    import pyarrow.parquet as pq

    for log_prob, kind in ((float(np.float32(-0.1)), "float"), (-0.1, "double")):
        write_rollout(tmp_path / "r.parquet", 0, [Group(4, [sampled([log_prob, -0.5])])])
        assert str(pq.read_schema(tmp_path / "r.parquet").field("rollout_log_probs").type.value_type) == kind


def test_what_is_no_rollout_is_refused_by_name(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    for name in ("broken.parquet", "missing.parquet"):
        with pytest.raises(DataError, match=f"{name} cannot be read as a rollout"):
            read_rollout(tmp_path / name)
    import pandas

    pandas.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(DataError, match="give a Parquet file of a run's rollouts/ folder"):
        read_rollout(tmp_path / "other.parquet")


def test_routed_experts_take_a_byte_for_each_layer_and_expert_of_a_token(tmp_path):
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=range(1000), group_id=0, sample_id=i, routed_experts=rng.integers(128, size=(999, 6, 8)).astype("u1")
        )
        for i in range(100)
    ]
    write_rollout(tmp_path / "r.parquet", 0, [Group(0, samples)])
    file = pq.read_metadata(tmp_path / "r.parquet")
    columns = [
        group.column(c) for group in map(file.row_group, range(file.num_row_groups)) for c in range(group.num_columns)
    ]
    size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == "routed_experts.data")
    assert 0 <= size - 100 * 999 * 6 * 8 < 100 * 16
