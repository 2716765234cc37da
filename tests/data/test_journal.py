"""The journal: lives of groups, what is kept for a resume, and undoing what came after a checkpoint."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.groups import finished, generate, pending
from vime.data.journal import Journal
from vime.errors import DataError


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite")


def stages(journal: Journal) -> dict[int, str]:
    return {life.group_id: life.stage for life in journal.lives()}


def test_a_life_is_taken_finished_trained_and_another_dropped_with_its_reason(journal: Journal) -> None:
    groups = [pending(i, place=(1, 40 + i)) for i in range(3)]
    journal.taken(groups, 6)
    assert set(stages(journal).values()) == {"taken"}
    journal.finished(generate(groups[0], version=8))
    journal.finished(generate(groups[1], version=8))
    journal.dropped([groups[1]], "zero_std")
    journal.put_back([groups[2]])
    journal.trained(6, [groups[0]])
    zero, one, two = journal.lives()
    assert (zero.stage, zero.rollout_id, zero.epoch, zero.idx, zero.oldest, zero.newest) == ("trained", 6, 1, 40, 8, 8)
    assert zero.num_tokens == 6 and zero.ended_s is not None and zero.finished_s is not None
    assert zero.taken_s <= zero.finished_s <= zero.ended_s
    assert (one.stage, one.reason) == ("dropped", "zero_std") and not one.is_open
    assert (two.stage, two.num_put_back, two.is_open) == ("put_back", 1, True)


def test_a_reader_beside_the_run_sees_each_call_whole_and_cannot_write(journal: Journal) -> None:
    journal.taken([pending(0), pending(1)], 0)
    beside = Journal.read(journal.path)
    assert stages(beside) == {0: "taken", 1: "taken"}
    journal.trained(0, [pending(0)])
    assert stages(beside) == {0: "trained", 1: "taken"}
    with pytest.raises(OSError, match=r"cannot be written.*readonly"):
        beside.taken([pending(2)], 0)


def test_what_is_done_survives_a_process_that_never_closes_the_file(journal: Journal) -> None:
    journal.taken([pending(0)], 0)
    journal.finished(finished(0))
    again = Journal(journal.path)  # the first connection is still open, as after a kill
    assert stages(again) == {0: "finished"} and again.id == journal.id
    kept = again.kept(0)
    assert kept is not None and kept[1] and kept[0] == finished(0)


def test_bytes_are_kept_until_trained_and_saved_or_of_versions_that_no_checkpoint_knows(journal: Journal) -> None:
    journal.taken([pending(i) for i in range(4)], 0)
    journal.finished(finished(0, version=1))
    journal.finished(finished(1, version=2))
    journal.trained(0, [pending(0), pending(1)])
    assert journal.kept(0) is not None  # the step is not saved: a resume trains on it again
    assert journal.kept(1) is None  # newer than anything saved, and trained on: no resume can use it
    journal.saved(0, 2, journal.sync())
    assert journal.kept(0) is None
    mark = journal.sync()
    journal.finished(finished(2, version=2))
    journal.finished(finished(3, version=2))
    journal.trained(1, [pending(2)])  # while the checkpoint of rollout 0 is written in the background
    journal.saved(0, 2, mark)
    assert journal.kept(2) is not None and journal.kept(3) is not None


def test_a_journal_of_a_run_without_checkpoints_keeps_no_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", keeps_payloads=False)
    journal.taken([pending(0)], 0)
    journal.finished(finished(0))
    assert stages(journal) == {0: "finished"} and journal.kept(0) is None


def test_what_json_cannot_hold_is_noted_and_generated_again_after_a_kill(journal: Journal) -> None:
    group = finished(0)
    group.samples[0].metadata["object"] = object()
    journal.taken([group], 0)
    journal.finished(group)
    assert stages(journal) == {0: "finished"} and journal.kept(0) is None
    (note,) = journal.notes(0)
    assert note.what == "unsaved" and "JSON" in str(note.detail)


def test_a_resume_undoes_what_came_after_the_checkpoint(journal: Journal) -> None:
    journal.taken([pending(i) for i in range(4)], 0)
    journal.trained(0, [pending(0)])
    journal.dropped([pending(1)], "zero_std")
    mark = journal.sync()  # in flight: 2 and 3
    journal.saved(0, 2, mark)
    journal.finished(finished(2, version=2))
    journal.taken([pending(4), pending(5), pending(6)], 1)
    journal.finished(finished(4, version=2))
    journal.trained(1, [pending(2), pending(4)])
    journal.finished(finished(5, version=3))
    found = journal.rewind(mark, waiting=[2, 3], unsure=False, version=2)
    assert stages(journal) == {
        **{0: "trained", 1: "dropped"},
        **{2: "put_back", 3: "put_back"},
        **{4: "undone", 5: "undone", 6: "undone"},
    }
    assert found.finished == {2, 4} and found.num_waiting == 2 and found.num_undone == 3 and found.num_lost == 0
    (note,) = journal.notes()
    assert (note.group_id, note.what) == (5, "again") and "version 3" in str(note.detail)
    journal.taken([pending(4), pending(5)], 1)  # the prompts come again, under the same ids
    assert stages(journal)[4] == stages(journal)[5] == "taken"
    assert not [n for n in journal.notes() if n.what == "doubled"]


def test_a_resume_from_an_older_checkpoint_undoes_more(journal: Journal) -> None:
    journal.taken([pending(0)], 0)
    journal.trained(0, [pending(0)])
    first = journal.sync()
    journal.saved(0, 2, first)
    journal.taken([pending(1)], 1)
    journal.trained(1, [pending(1)])
    journal.saved(1, 3, journal.sync())
    journal.rewind(first, waiting=[], unsure=False, version=2)
    assert stages(journal) == {0: "trained", 1: "undone"}
    assert journal.query("SELECT rollout_id FROM saves") == [(0,)]


def test_settings_that_changed_make_all_of_it_be_generated_again(journal: Journal) -> None:
    journal.taken([pending(0)], 0)
    journal.finished(finished(0))
    found = journal.rewind(0, waiting=[], unsure=False, version=1, why_not="rm_type changed")
    assert not found.finished and journal.kept(0) is None
    assert [(n.what, n.detail) for n in journal.notes()] == [("again", "was finished; rm_type changed")]


def test_a_group_that_the_restored_source_does_not_hold_is_lost(journal: Journal) -> None:
    journal.taken([pending(0), pending(1)], 0)
    mark = journal.sync()
    found = journal.rewind(mark, waiting=[1], unsure=False, version=1)
    assert stages(journal) == {0: "lost", 1: "put_back"} and found.num_lost == 1


def test_a_prompt_that_is_trained_on_or_handed_out_twice_is_noted(journal: Journal) -> None:
    journal.taken([pending(0), pending(1)], 0)
    journal.trained(0, [pending(0), pending(1)])
    journal.trained(1, [pending(0)])
    journal.taken([pending(1)], 1)
    assert [(n.group_id, n.what) for n in journal.notes()] == [(0, "doubled"), (1, "doubled")]


def test_tokens_put_back_are_kept_for_the_next_rollout(journal: Journal) -> None:
    half = generate(pending(0), version=1, tokens=2)
    journal.taken([half], 0)
    journal.put_back([half])
    found = journal.rewind(0, waiting=[], unsure=False, version=1)
    kept = journal.kept(0)
    assert found.partial == {0} and kept is not None and not kept[1] and kept[0].samples[0].response_length == 2


def test_a_file_that_is_no_journal_and_one_of_another_format_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "journal.sqlite"
    text.write_text("not a database, but long enough to look at " * 100)
    with pytest.raises(DataError, match=r"journal.sqlite: the journal.*damaged"):
        Journal(text)
    with pytest.raises(DataError, match="is not there"):
        Journal.read(tmp_path / "none.sqlite")
    other = Journal(tmp_path / "other.sqlite")
    other.set_meta(format="99")
    other.close()
    with pytest.raises(DataError, match="format 99"):
        Journal(other.path)


def test_a_call_that_fails_leaves_nothing_half_written(journal: Journal) -> None:
    journal.taken([pending(0)], 0)
    with pytest.raises(AttributeError):
        journal.dropped([pending(0), None], "why")  # type: ignore[list-item]
    assert stages(journal) == {0: "taken"}
    with sqlite3.connect(journal.path) as beside:  # and the file is not locked
        beside.execute("SELECT count(*) FROM lives")


_FILLS = """
import resource, sys
from pathlib import Path
from tests.data.groups import finished, pending
from vime.data.journal import Journal
from vime.errors import VimeError

journal = Journal(Path(sys.argv[1]))
journal.taken([pending(i) for i in range(999)], 0)
size = sum(p.stat().st_size for p in journal.path.parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 65536, resource.RLIM_INFINITY))
done = 0
try:
    for done in range(999):
        journal.finished(finished(done))
except OSError as error:
    print(done, error.filename, error.strerror)
"""


def test_a_file_that_cannot_grow_ends_with_its_path_and_holds_whole_calls_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    ended = subprocess.run([sys.executable, "-c", _FILLS, str(path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    done, name, reason = ended.stdout.split(maxsplit=2)
    assert name == str(path) and reason.startswith("the journal of the data buffer cannot be written")
    journal = Journal(path)  # there is room again
    journal.check_file()
    assert stages(journal) == {i: "finished" if i < int(done) else "taken" for i in range(999)}
    assert all(journal.kept(i) is not None for i in range(int(done))) and journal.kept(int(done)) is None
    journal.finished(finished(int(done)))


def test_a_journal_whose_last_event_is_no_number_is_damaged(journal: Journal) -> None:
    journal.set_meta(event="x")
    journal.close()
    for opens in (Journal, Journal.read):
        with pytest.raises(DataError, match="is damaged: its last event is 'x'"):
            opens(journal.path)
