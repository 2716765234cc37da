"""The data buffer: every prompt once an epoch, exact resume, first in first out."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import char_tokenizer
from vime.config.hooks import UserFunction
from vime.data.buffer import DataBuffer, oldest_version, pending_again
from vime.data.prompt_set import Prompt
from vime.data.prompts import check_rows
from vime.data.records import RowKeys
from vime.data.sample_json import sample_from_json, sample_to_json
from vime.errors import DataError, HookError
from vime.observability.metrics import check_names
from vime.types import Group, RoutedRows, Sample, SampleStatus, SamplingSupport, VersionSpan


def prompts(n: int) -> list[Prompt]:
    return [Prompt(prompt=str(i), tokens=(i, i + 1), label=i, metadata={"nested": {"i": i}}) for i in range(n)]


def buffer(n: int = 5, *, samples: int = 2, shuffle: bool = True, seed: int = 7, **more: Any) -> DataBuffer:
    return DataBuffer(prompts(n), n_samples_per_prompt=samples, shuffle=shuffle, seed=seed, **more)


def labels(groups: list[Group]) -> list[Any]:
    return [group.samples[0].label for group in groups]


@given(
    n=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    pulls=st.lists(st.integers(0, 9), max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_every_prompt_comes_once_an_epoch_with_fresh_ids(n: int, shuffle: bool, seed: int, pulls: list[int]) -> None:
    source = buffer(n, shuffle=shuffle, seed=seed)
    groups = [group for pull in pulls for group in source.get_groups(pull)]
    for start in range(0, len(groups) - n + 1, n):
        assert sorted(labels(groups[start : start + n])) == list(range(n))
    rest = Counter(labels(groups[len(groups) // n * n :]))
    assert not rest or max(rest.values()) == 1
    assert source.metrics()["data/epoch"] == len(groups) / n
    samples = [sample for group in groups for sample in group.samples]
    assert [group.group_id for group in groups] == list(range(len(groups)))
    assert [sample.sample_id for sample in samples] == list(range(len(samples)))
    assert len({sample.trajectory_id for sample in samples}) == len(samples)
    assert all(s.status is SampleStatus.PENDING and s.response_length == 0 for s in samples)


@given(
    operations=st.lists(st.tuples(st.sampled_from(["get", "put_back"]), st.integers(0, 6)), max_size=15),
    shuffle=st.booleans(),
    by_age=st.booleans(),
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4),
    mixed=st.booleans(),
    cut=st.integers(0, 15),
)
@settings(max_examples=100, deadline=None)
def test_a_restored_buffer_continues_exactly(
    operations: list[tuple[str, int]],
    shuffle: bool,
    by_age: bool,
    parts: list[tuple[int, int]],
    mixed: bool,
    cut: int,
) -> None:
    sizes, weights = [size for size, _ in parts], [weight / 7 for _, weight in parts]

    def fresh() -> DataBuffer:
        return buffer(
            sum(sizes),
            shuffle=shuffle,
            part_sizes=sizes,
            weights=weights if mixed else None,
            sort_by_staleness=by_age,
        )

    def play(source: DataBuffer, part: list[tuple[str, int]], held: list[Group], out: list[Any]) -> None:
        for operation, n in part:
            if operation == "get":
                groups = source.get_groups(n)
                held += groups
                out.append([sample_to_json(s) for group in groups for s in group.samples])
            else:
                for group in held[:n]:
                    for sample in group.samples:  # partial responses, of this "policy version"
                        sample.append_response([1], [-0.5], version=len(sample.weight_versions) + group.group_id % 3)
                source.put_back(held[:n])
                del held[:n]

    straight: list[Any] = []
    play(fresh(), operations, [], straight)

    resumed: list[Any] = []
    held: list[Group] = []
    first = fresh()
    play(first, operations[:cut], held, resumed)
    second = fresh()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    play(second, operations[cut:], held, resumed)
    assert resumed == straight


def test_groups_put_back_come_first_and_in_order() -> None:
    source = buffer(10, shuffle=False)
    groups = source.get_groups(5)
    source.put_back([groups[3], groups[1]])
    source.put_back([groups[4]])
    assert source.metrics()["data/num_buffered_groups"] == 3
    assert [group.group_id for group in source.get_groups(4)] == [3, 1, 4, 5]


def user_filter(function: Any) -> UserFunction:
    return UserFunction("--buffer-filter-path", "my.choose", function)


def context() -> Any:
    return SimpleNamespace(config="the settings")


def with_versions(source: DataBuffer, versions: list[int | None]) -> list[Group]:
    """Groups whose first sample has a token of this policy version."""
    groups = source.get_groups(len(versions))
    for group, version in zip(groups, versions, strict=True):
        if version is not None:
            group.samples[0].append_response([1, 2], [-1.0, -1.0], version=version)
    return groups


def test_the_stalest_groups_come_first_when_asked_for() -> None:
    source = buffer(10, shuffle=False, sort_by_staleness=True)
    groups = with_versions(source, [3, None, 1, 3])
    source.put_back(groups)
    assert [group.group_id for group in source.get_groups(2)] == [2, 0]
    assert [group.group_id for group in source.get_groups(3)] == [3, 1, 4], "what has no tokens is not stale"


def test_a_buffer_filter_chooses_among_the_groups_put_back() -> None:
    calls = []

    def choose(config: Any, rollout_id: int, groups: list[Group], n: int) -> list[Group]:
        calls.append((config.config, rollout_id, [g.group_id for g in groups], n))
        for group in [g for g in groups if oldest_version(g) < 2]:
            groups.remove(group)  # too old to go on with
        return groups[-1:]

    source = buffer(10, shuffle=False, buffer_filter=user_filter(choose))
    source.begin_rollout(context(), 7)
    assert len(source.get_groups(1)) == 1
    assert calls == [], "nothing was put back, so there is nothing to choose from"
    source.put_back(with_versions(source, [2, 1, 4, 5]))
    assert [group.group_id for group in source.get_groups(2)] == [4, 5]
    assert calls == [("the settings", 7, [1, 2, 3, 4], 2)]
    assert source.metrics()["data/num_buffered_groups"] == 2, "1 and 3 wait; 2 was thrown away"
    assert source.metrics()["data/num_discarded_groups"] == 1
    again = buffer(10, shuffle=False)
    again.restore(json.loads(json.dumps(source.state())))
    assert again.metrics() == source.metrics()
    assert [group.group_id for group in again.get_groups(3)] == [1, 3, 6]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda groups: 1 / 0, "--buffer-filter-path my.choose raised ZeroDivisionError"),
        (lambda groups: None, "returned None .* but a list of the buffer's groups is expected"),
        (lambda groups: [Group(0, [])], "a list of the buffer's groups is expected"),
        (lambda groups: groups * 2, "returned 4 groups; at most 1 are wanted, each once"),
        (lambda groups: groups, "returned 2 groups; at most 1 are wanted"),
        (lambda groups: groups.append(Group(9, [])) or [], "put groups into the buffer; it may only take some out"),
    ],
)
def test_a_buffer_filter_that_answers_nonsense_is_named(answer: Any, problem: str) -> None:
    source = buffer(buffer_filter=user_filter(lambda config, rollout_id, groups, n: answer(groups)))
    source.put_back(source.get_groups(2))
    source.begin_rollout(context(), 0)
    with pytest.raises(HookError, match=problem):
        source.get_groups(1)
    assert source.metrics()["data/num_buffered_groups"] == 2


def test_without_prompts_the_groups_are_empty_and_numbered() -> None:
    source = DataBuffer(None, n_samples_per_prompt=2, shuffle=False, seed=0)
    assert source.epoch_size() is None
    first, second = source.get_groups(2)
    assert [s.sample_id for s in [*first.samples, *second.samples]] == [0, 1, 2, 3]
    assert first.samples[0].tokens == ()
    source.put_back([second])
    again = DataBuffer(None, n_samples_per_prompt=2, shuffle=False, seed=0)
    again.restore(json.loads(json.dumps(source.state())))
    assert [group.group_id for group in again.get_groups(2)] == [1, 2]
    with pytest.raises(DataError, match="--prompt-data had 1 parts, and has 0"):
        again.restore(buffer().state())


def test_it_says_how_far_it_is() -> None:
    source = buffer(4)
    source.put_back(source.get_groups(6)[:2])
    assert source.metrics() == {
        "data/epoch": 1.5,
        "data/num_prompts": 4,
        "data/num_buffered_groups": 2,
        "data/num_discarded_groups": 0,
    }
    check_names(source.metrics())


def test_a_resume_with_another_file_names_it(tmp_path: Path) -> None:
    words = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]

    def source(*texts: str) -> DataBuffer:
        for word, text in zip(words, texts, strict=True):
            Path(word).write_text(json.dumps({"input": text}) + "\n")
        found = check_rows(words, RowKeys()).tokenise(char_tokenizer())
        return DataBuffer(found, n_samples_per_prompt=1, shuffle=False, seed=0, weights=[1, 2])

    state = json.loads(json.dumps(source("x", "y").state()))
    source("x", "y").restore(state)
    with pytest.raises(
        DataError, match=r"the prompts of 2: .*b\.jsonl are not those of 2: .*weights alone by --finetune"
    ):
        source("x", "z").restore(state)


def test_a_group_cannot_be_put_back_twice_or_from_elsewhere() -> None:
    source = buffer()
    (group,) = source.get_groups(1)
    source.put_back([group])
    with pytest.raises(ValueError, match="group 0 is put back twice"):
        source.put_back([group])
    with pytest.raises(ValueError, match="group 9 did not come from this buffer"):
        source.put_back([Group(9, [Sample(group_id=9)])])
    assert source.metrics()["data/num_buffered_groups"] == 1


def test_put_back_groups_keep_their_generated_tokens_over_a_restart() -> None:
    source = buffer()
    (group,) = source.get_groups(1)
    num_rows = len(group.samples[0].tokens) + 1
    rows = RoutedRows(0, np.ones((num_rows, 2, 2), np.uint8))
    support = SamplingSupport.of([[7, 4], [5]])
    group.samples[0].append_response([4, 5], [-0.1, -1e-9], version=3, support=support, routed_experts=rows)
    group.samples[0].append_response([6], trainable=False)
    group.samples[0].status = SampleStatus.ABORTED
    source.put_back([group])
    again = buffer()
    again.restore(json.loads(json.dumps(source.state())))
    (restored,) = again.get_groups(1)
    sample = restored.samples[0]
    assert sample.tokens == (*group.samples[0].prompt_tokens, 4, 5, 6)
    assert sample.rollout_log_probs[:2] == (-0.1, -1e-9)
    assert math.isnan(sample.rollout_log_probs[2])
    assert sample.weight_versions == (VersionSpan(3, 0, 2),)
    assert sample.status is SampleStatus.ABORTED
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint8
    assert np.array_equal(sample.routed_experts, rows.rows)
    assert sample.support is not None and sample.support.rows() == [[7, 4], [5], []]


def test_every_field_of_a_sample_survives_json() -> None:
    sample = Sample(prompt=[{"role": "user", "content": "x"}], tokens=(1, 2), label=[1], metadata={"a": None})
    sample.append_response([3], supervised=True)
    sample.reward, sample.response, sample.trace = {"acc": 0.1}, "c", [{"name": "x", "start_s": 0.5, "end_s": 1.0}]
    data = json.loads(json.dumps(sample_to_json(sample)))
    assert sample_to_json(sample_from_json(data)) == sample_to_json(sample)


def test_samples_that_json_cannot_hold_are_named() -> None:
    source = buffer()
    (group,) = source.get_groups(1)
    group.samples[1].metadata["handle"] = object()
    source.put_back([group])
    with pytest.raises(DataError, match="sample 1 cannot be saved"):
        source.state()


@pytest.mark.parametrize(
    ("other", "meaning"),
    [
        (buffer(6), "the prompts of prompts are not those of prompts"),
        (buffer(seed=8), "--rollout-seed was 8, and is 7"),
        (buffer(shuffle=False), "--rollout-shuffle was False, and is True"),
        (buffer(weights=[1.0]), r"--prompt-data-weights was \[1.0\], and is None"),
    ],
)
def test_a_state_of_another_run_is_refused(other: DataBuffer, meaning: str) -> None:
    source = buffer()
    source.get_groups(3)
    before = source.state()
    with pytest.raises(DataError, match=meaning):
        source.restore(other.state())
    assert source.state() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 1},
        {"drawn": [-1]},
        {"drawn": [1, 2]},
        {"drawn": ["x"]},
        {"next_group_id": -1},
        {"data": None},
        {"put_back": [{}]},
        {"put_back": [{"group_id": 0, "samples": [{}]}]},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    source = buffer()
    source.get_groups(3)
    before = source.state()
    with pytest.raises(DataError, match=r"format|damaged|does not belong"):
        source.restore(before | damage)
    assert source.state() == before


def test_the_number_of_samples_may_change_on_resume() -> None:
    source = buffer(samples=2)
    source.get_groups(2)
    wider = buffer(samples=4)
    wider.restore(source.state())
    (group,) = wider.get_groups(1)
    assert [s.sample_id for s in group.samples] == [4, 5, 6, 7]


def test_shuffles_differ_by_epoch_and_seed_and_are_stable() -> None:
    order = labels(buffer(50).get_groups(150))
    assert order[:50] != order[50:100] != order[100:]
    assert order != labels(buffer(50, seed=8).get_groups(150))
    # A literal: a change of numpy or of this code must not reorder the prompts of a run that is resumed.
    assert labels(buffer(10).get_groups(10)) == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3]


def test_siblings_do_not_share_metadata() -> None:
    (group,) = buffer().get_groups(1)
    group.samples[0].metadata["nested"]["i"] = "changed"
    assert group.samples[1].metadata["nested"]["i"] != "changed"


def test_pending_again_forgets_the_response_and_keeps_the_identity() -> None:
    (group,) = buffer().get_groups(1)
    sample = group.samples[0]
    sample.append_response([9], [-1.0], version=0)
    sample.response, sample.reward, sample.status = "x", 1.0, SampleStatus.COMPLETED
    sample.metadata["reward_verdict"] = "correct"
    (fresh,) = pending_again(Group(0, [sample])).samples
    (expected,) = buffer(samples=1).get_groups(1)
    assert sample_to_json(fresh) == sample_to_json(expected.samples[0])


@pytest.mark.parametrize(("n", "samples", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_buffers_are_refused(n: int, samples: int, seed: int) -> None:
    with pytest.raises(ValueError):
        buffer(n, samples=samples, seed=seed)
