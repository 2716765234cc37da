"""A data source with its journal: what a checkpoint keeps of it, and what is handed out after a kill."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.groups import generate, pending
from vime.data.buffer import DataBuffer
from vime.data.journal import Journal
from vime.data.journaled import KEY, JournaledSource
from vime.data.prompt_set import Prompt
from vime.errors import DataError
from vime.protocols import DataSource
from vime.types import Group, SampleStatus

NUM_PROMPTS = 7


def buffer() -> DataBuffer:
    prompts = [Prompt(prompt=f"p{i}", tokens=(i, 1), label=i, metadata={"row": i}) for i in range(NUM_PROMPTS)]
    return DataBuffer(prompts, n_samples_per_prompt=2, shuffle=True, seed=3)


def start(folder: Path, source: DataSource | None = None, *, version: int = 1, **more: Any) -> JournaledSource:
    """A run's source; that of a killed one is simply left behind."""
    journal = Journal(folder / "journal.sqlite", version=version)
    made: Any = JournaledSource
    return made(source or buffer(), journal, version=version, **{"uses_finished": True, **more})  # type: ignore[no-any-return]


def save(source: JournaledSource) -> dict[str, Any]:
    """The state as a checkpoint keeps it."""
    state: dict[str, Any] = json.loads(json.dumps(source.state()))
    return state


def stages(source: JournaledSource) -> dict[int, str]:
    return {life.group_id: life.stage for life in source.journal.lives()}


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.group_id for group in groups]


def prompts(groups: Sequence[Group]) -> list[Any]:
    return [group.samples[0].prompt for group in groups]


def test_groups_that_were_out_come_first_after_a_resume_and_then_the_next_prompts(tmp_path: Path) -> None:
    first = start(tmp_path)
    taken = first.get_groups(4)
    first.trained(0, [taken[1]])
    first.dropped([taken[3]], "zero_std")
    state = save(first)
    straight = [*prompts([taken[0], taken[2]]), *prompts(first.get_groups(3))]
    second = start(tmp_path, version=2)
    second.restore(state)
    again = second.get_groups(5)
    assert prompts(again) == straight and ids(again) == [0, 2, 4, 5, 6]
    assert again[0] == taken[0] and again[0].place == taken[0].place, "as they were handed out, whole"
    assert stages(second) == {0: "taken", 1: "trained", 2: "taken", 3: "dropped", 4: "taken", 5: "taken", 6: "taken"}


def test_what_generation_made_of_a_group_is_not_in_what_a_resume_hands_out(tmp_path: Path) -> None:
    first = start(tmp_path)
    (group,) = first.get_groups(1)
    generate(group, version=1)
    group.samples[0].metadata["mine"] = 1
    second = start(tmp_path)
    second.restore(save(first))
    (again,) = second.get_groups(1)
    assert [s.response_length for s in again.samples] == [0, 0] and "mine" not in again.samples[0].metadata
    again.samples[0].metadata["mine"] = 1
    assert "mine" not in again.samples[1].metadata


def test_finished_groups_are_used_again_unless_a_lost_version_sampled_them(tmp_path: Path) -> None:
    first = start(tmp_path)
    old = first.get_groups(2)
    first.finished(generate(old[0], version=1))
    first.trained(0, old)
    state = save(first)
    first.saved(0, 2, state)
    known, lost, flying = first.get_groups(3)
    first.finished(generate(known, version=2))
    first.trained(1, [known])  # a step that was not saved
    first.finished(generate(lost, version=3))
    second = start(tmp_path, version=2)
    second.restore(state)
    again = second.get_groups(3)
    assert ids(again) == ids([known, lost, flying])
    assert [group.is_finished for group in again] == [True, False, False]
    assert again[0].samples == known.samples and again[1].samples[0].response_length == 0
    notes = [(note.group_id, note.what) for note in second.journal.notes() if note.group_id is not None]
    assert notes == [(lost.group_id, "again"), (known.group_id, "reused")]
    assert "1 of them are used again" in str(second.resumed)


def test_a_second_kill_before_the_next_checkpoint_loses_nothing_more(tmp_path: Path) -> None:
    first = start(tmp_path)
    state = save(first)
    a, _b = first.get_groups(2)
    first.finished(generate(a, version=1))
    for _ in range(3):
        later = start(tmp_path)
        later.restore(state)
        again = later.get_groups(2)
        assert ids(again) == [0, 1] and [group.is_finished for group in again] == [True, False]
        later.finished(again[0])
        later.trained(0, [again[0]])
    assert not [note for note in later.journal.notes() if note.what in ("doubled", "lost")]


def test_a_finished_group_that_comes_back_stays_finished(tmp_path: Path) -> None:
    first = start(tmp_path)
    state = save(first)
    first.finished(generate(first.get_groups(1)[0], version=1))
    second = start(tmp_path)
    second.restore(state)
    (again,) = second.get_groups(1)
    second.put_back([again])
    assert second.get_groups(1) == [again] and again.is_finished


def test_a_rollout_function_that_does_not_know_finished_groups_gets_prompts(tmp_path: Path) -> None:
    first = start(tmp_path, uses_finished=False)
    state = save(first)
    first.finished(generate(first.get_groups(1)[0], version=1))
    second = start(tmp_path, uses_finished=False)
    second.restore(state)
    (again,) = second.get_groups(1)
    assert not again.is_finished and again.samples[0].response_length == 0


def test_changed_settings_generate_all_of_it_anew_and_say_so(tmp_path: Path) -> None:
    first = start(tmp_path)
    state = save(first)
    first.finished(generate(first.get_groups(1)[0], version=1))
    second = start(tmp_path, why_not="changed since: --rm-type")
    second.restore(state)
    assert "changed since: --rm-type" in str(second.resumed)
    assert not second.get_groups(1)[0].is_finished


@pytest.mark.parametrize("is_out", [False, True])
def test_changed_settings_leave_no_tokens_of_what_the_checkpoint_has(tmp_path: Path, is_out: bool) -> None:
    """Sampled at another temperature, say: their log-probs would be of another distribution than the trainer's."""
    first = start(tmp_path)
    (half,) = first.get_groups(1)
    first.put_back([generate(half, version=1, tokens=2)])
    if is_out:
        first.get_groups(1)
    state = save(first)
    kept, anew = start(tmp_path), start(tmp_path, why_not="changed since: --rollout-temperature")
    kept.restore(state)
    assert [s.response_length for s in kept.get_groups(1)[0].samples] == [2, 2]
    anew.restore(state)
    (again,) = anew.get_groups(1)
    assert again.group_id == half.group_id and [s.response_length for s in again.samples] == [0, 0]
    assert all(s.tokens == s.prompt_tokens and s.status is SampleStatus.PENDING for s in again.samples)


def test_what_was_kept_of_another_prompt_is_not_used(tmp_path: Path) -> None:
    first = start(tmp_path)
    state = save(first)
    first.finished(generate(first.get_groups(1)[0], version=1))
    first.journal.close()
    other = DataBuffer([Prompt(prompt="x", tokens=(9, 9), label=0)], n_samples_per_prompt=2, shuffle=False, seed=3)
    second = start(tmp_path, other)
    other.check_state = lambda state: None  # type: ignore[method-assign]  # which would refuse other data
    other._order.move_to([0])  # type: ignore[union-attr]
    second.restore(state)
    (again,) = second.get_groups(1)
    assert not again.is_finished and again.samples[0].tokens == (9, 9)
    assert [n.detail for n in second.journal.notes(0)] == ["what was kept of it is of another prompt"]


def test_tokens_of_a_partial_rollout_are_gone_on_from(tmp_path: Path) -> None:
    first = start(tmp_path)
    state = save(first)
    (half,) = first.get_groups(1)
    first.put_back([generate(half, version=1, tokens=2)])
    second = start(tmp_path)
    second.restore(state)
    (again,) = second.get_groups(1)
    assert not again.is_finished and [s.response_length for s in again.samples] == [2, 2]
    assert second.get_groups(1)[0].samples[0].response_length == 0


def test_a_partial_group_that_is_out_when_it_is_saved_keeps_its_tokens(tmp_path: Path) -> None:
    first = start(tmp_path)
    (half,) = first.get_groups(1)
    first.put_back([generate(half, version=1, tokens=2)])
    (out,) = first.get_groups(1)
    kept = [list(sample.tokens) for sample in out.samples]
    state = save(first)
    second = start(tmp_path)
    second.restore(state)
    assert [list(sample.tokens) for sample in second.get_groups(1)[0].samples] == kept


class Counting(DataSource):
    """A source of a user's: numbers its groups from 0 in each of its epochs."""

    def __init__(self) -> None:
        self.next, self.back = 0, list[Group]()

    def get_groups(self, n: int) -> list[Group]:
        self.back, groups = self.back[n:], self.back[:n]
        while len(groups) < n:
            groups.append(replace(pending(self.next % 3), place=None))
            self.next += 1
        return groups

    def put_back(self, groups: Sequence[Group]) -> None:
        self.back += groups

    def state(self) -> dict[str, Any]:
        return {"next": self.next}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert set(state) == {"next"}, "what is not its own does not reach it"
        self.next = state["next"]

    def epoch_size(self) -> int | None:
        return 3

    def of_its_own(self) -> str:
        return f"next is {self.next}"


def test_a_source_of_the_users_works_and_resumes_as_well(tmp_path: Path) -> None:
    first = start(tmp_path, Counting())
    for rollout_id in range(2):
        first.trained(rollout_id, first.get_groups(3))  # the second time the same ids: a new epoch, nothing doubled
    out = first.get_groups(2)
    state = save(first)
    first.finished(generate(out[1], version=1))
    assert first.of_its_own() == "next is 8"
    second = start(tmp_path, Counting())
    second.restore(state)
    again = second.get_groups(3)
    assert ids(again) == [0, 1, 2] and [g.is_finished for g in again] == [False, True, False]
    assert not [n for n in second.journal.notes() if n.what in ("doubled", "lost")]
    with pytest.raises(AttributeError):
        second.nothing_of_the_kind()


class Bad(Counting):
    def get_groups(self, n: int) -> list[Group]:
        return super().get_groups(n + 1)


def test_a_source_that_gives_the_wrong_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Bad.get_groups\(2\) returned 3 groups"):
        start(tmp_path, Bad()).get_groups(2)


def test_a_checkpoint_of_a_run_without_a_journal_and_one_with_another_are_gone_on_from(tmp_path: Path) -> None:
    plain = buffer()
    plain.get_groups(3)
    old = start(tmp_path / "a")
    old.restore(plain.state())
    assert ids(old.get_groups(1)) == [3]
    other = start(tmp_path / "b")
    other.restore(save(old))
    assert ids(other.get_groups(2)) == [3, 4]
    damaged = save(other)
    damaged[KEY]["out"][0].pop("ids")
    with pytest.raises(DataError, match="under way that were saved are damaged"):
        start(tmp_path / "c").restore(damaged)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_with_what_is_finished(tmp_path: Path) -> None:
    first = start(tmp_path)
    taken = first.get_groups(2)
    first.finished(generate(taken[1], version=1))
    second = start(tmp_path)
    second.begin_anew()
    again = second.get_groups(3)
    assert ids(again) == [0, 1, 2] and [group.is_finished for group in again] == [False, True, False]


def test_what_a_buffer_filter_discards_is_dropped_for_that_reason(tmp_path: Path) -> None:
    from vime.config.hooks import UserFunction

    def filter_all(config: Any, rollout_id: int, groups: list[Group], n: int) -> list[Group]:
        del groups[:]
        return []

    inner = buffer()
    inner._filter = UserFunction("--buffer-filter-path", "x.y", filter_all)
    inner._context = object()  # type: ignore[assignment]
    source = start(tmp_path, inner)
    source.put_back(source.get_groups(2))
    source.get_groups(1)
    assert [(life.stage, life.reason) for life in source.journal.lives()][:2] == [("dropped", "buffer_filter")] * 2


def test_state_may_be_asked_for_while_another_thread_takes_groups(tmp_path: Path) -> None:
    source = start(tmp_path)
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            groups = source.get_groups(3)
            source.put_back(groups[:1])
            source.trained(0, groups[1:])

    thread = threading.Thread(target=take)
    thread.start()
    try:
        for _ in range(20):
            state = source.state()
            held = {entry["group_id"] for entry in state[KEY]["out"]} | {g["group_id"] for g in state["put_back"]}
            trained = {i for i, stage in stages(source).items() if stage == "trained"}
            assert len({entry["group_id"] for entry in state[KEY]["out"]}) == len(state[KEY]["out"])
            assert set(range(state["next_group_id"])) - held <= trained
    finally:
        stop.set()
        thread.join()
