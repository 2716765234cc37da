"""Spans, and the trace file that Perfetto opens."""

import json

import pytest

from vime.observability.chrome_trace import Lanes, nested
from vime.observability.trace import SpanLog, add_span, seconds_outside_generation, span
from vime.observability.trace_file import RunTracer, TraceFile
from vime.types import Group, Sample


def at(name, start, end, **details):
    return {"name": name, "start_s": start, "end_s": end, **details}


def read(path):
    """The events of a trace, checked: all fields there, and the spans of each track nest."""
    events = json.loads(path.read_text("utf-8"))
    tracks = {}
    for event in events:
        assert {"ph", "ts", "dur", "pid", "tid", "name"} <= set(event)
        if event["ph"] == "X":
            assert isinstance(event["ts"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for spans in tracks.values():
        open_until = []
        for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1], f"{event} leaves its parent"
            open_until.append(event["ts"] + event["dur"])
    return events


def named(events, name):
    return [e for e in events if e["ph"] == "X" and e["name"] == name]


def test_a_functions_own_spans_are_not_generation_and_count_once_where_they_overlap():
    sample = Sample(tokens=(1,))
    with pytest.raises(RuntimeError), span(sample, "tool", command="ls"):
        raise RuntimeError
    assert sample.trace[0]["name"] == "tool" and sample.trace[0]["command"] == "ls"
    trace = [at("generate", 0, 10), at("tool", 1, 4), at("search", 3, 5), at("tool", 7, 8)]
    assert seconds_outside_generation(trace) == 5.0
    with pytest.raises(ValueError, match="vime writes those itself"), span(sample, "generate"):
        pass


def test_add_span_gives_every_sample_the_time_since():
    samples = [Sample(tokens=(1,)), Sample(tokens=(2,))]
    add_span(samples, "reward", 5.0)
    assert [s.trace[0]["start_s"] for s in samples] == [5.0, 5.0] and samples[0].trace[0]["end_s"] > 5.0
    assert samples[0].trace[0] is not samples[1].trace[0]


def test_a_log_forgets_what_was_taken_and_the_oldest_beyond_its_length():
    log = SpanLog()
    with pytest.raises(KeyError), log.span("part"):
        raise KeyError
    assert [s["name"] for s in log.take()] == ["part"] and log.take() == []
    for _ in range(20_001):
        with log.span("x"):
            pass
    assert len(log.take()) == 20_000


def test_spans_that_only_overlap_are_told_apart_from_those_that_nest():
    inside, outside = nested([at("c", 3, 6), at("a", 0, 5), at("b", 0, 2), at("d", 5, 7)])
    assert [s["name"] for s in inside] == ["a", "b", "d"] and [s["name"] for s in outside] == ["c"]


def sample(number, trace):
    return Sample(
        tokens=(1, 2), sample_id=number, group_id=number, trajectory_id=number, reward=float("nan"), trace=trace
    )


def test_every_part_has_its_track_and_samples_share_lanes(tmp_path):
    path = tmp_path / "trace.json"
    takes = iter([[[at("actor_train", 6, 8)], [at("actor_train", 6, 9)]], [[], []]])
    tracer = RunTracer(TraceFile(path, 1 << 20), {"trainer": lambda: next(takes)})
    groups = [
        Group(
            i,
            [
                sample(
                    i,
                    [
                        at("generate", start, start + 2),
                        at("tool", start, start + 1),
                        at("tool", start + 0.5, start + 1.5),
                    ],
                )
            ],
        )
        for i, start in enumerate([0.0, 1.0, 3.0])
    ]
    tracer.step([at("rollout", 0, 5), at("train", 5, 9)], groups, rollout_id=4)
    first = read(path)  # whole while the run goes on
    old = Group(8, [sample(8, [at("generate", 7, 8)])])
    tracer.step([at("rollout", 9, 10)], [old], [Group(9, [sample(9, [at("generate", 9, 10)])])], rollout_id=5)
    tracer.close()
    events = read(path)
    assert events[: len(first)] == first
    (step, _) = named(events, "step")
    assert (step["ts"], step["dur"], step["args"]) == (0, 9_000_000, {"rollout_id": 4})
    assert {e["tid"] for e in named(events, "actor_train")} == {1, 101}
    lives = [named(events, f"sample {i}")[0] for i in range(3)]
    assert lives[0]["tid"] != lives[1]["tid"], "they ran at the same time"
    assert lives[2]["tid"] in {lives[0]["tid"], lives[1]["tid"]}, "a lane that is free is taken again"
    assert named(events, "sample 8") == [], "another run made it"
    assert lives[0]["args"]["reward"] == "nan", "JSON has no NaN"
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(1, "loop"), (2, "trainer"), (5, "samples"), (6, "held-out samples")}


def test_what_ran_beside_the_stages_has_a_track_and_its_samples_are_there(tmp_path):
    path = tmp_path / "trace.json"
    tracer = RunTracer(TraceFile(path, 1 << 20), {})
    ahead = Group(0, [sample(0, [at("generate", 3, 4)])])
    tracer.step([at("rollout_wait", 5, 6), at("train", 6, 9)], [ahead], beside=[at("rollout", 2, 6)], rollout_id=1)
    tracer.close()
    events = read(path)
    (step,), (rollout,) = named(events, "step"), named(events, "rollout")
    assert (step["ts"], step["dur"], step["tid"]) == (5_000_000, 4_000_000, 1)
    assert (rollout["dur"], rollout["tid"]) == (4_000_000, 101) and len(named(events, "sample 0")) == 1
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert tracks == {1: "stages", 101: "generation"}


def test_the_first_free_lane_is_taken():
    lanes = Lanes()
    events = lanes.place([[at("a", 0, 9)], [at("b", 1, 2)], [at("c", 10, 11)], [at("d", 10, 12)], [at("e", 10, 11)]], 1)
    assert {e["name"]: e["tid"] for e in events} == {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3}


def test_a_trace_stops_at_its_size_and_says_so_once(tmp_path, caplog):
    path = tmp_path / "trace.json"
    tracer = RunTracer(TraceFile(path, 2_000), {})
    for i in range(50):
        tracer.step([at("rollout", i, i + 1)], rollout_id=i)
    tracer.close()
    assert path.stat().st_size <= 2_000 and 0 < len(named(read(path), "rollout")) < 50
    assert caplog.text.count("--trace-max-mib") == 1


def test_an_unknown_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match="trainr"):
        RunTracer(TraceFile(tmp_path / "t.json", 100), {"trainr": lambda: []})


def test_counts_are_a_curve_of_the_loop(tmp_path):
    tracer = RunTracer(TraceFile(tmp_path / "trace.json", 1 << 20), {})
    tracer.step([at("train", 100, 101)], counts=[(100.25, {"generating": 3.0, "finished": 1.0})], rollout_id=0)
    tracer.close()
    (curve,) = [e for e in read(tmp_path / "trace.json") if e["ph"] == "C"]
    assert (curve["ts"], curve["args"]) == (100_250_000, {"generating": 3.0, "finished": 1.0})
    assert curve["pid"] == next(e for e in read(tmp_path / "trace.json") if e["name"] == "train")["pid"]
