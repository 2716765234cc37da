"""Accounting for every prompt of a journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.groups import finished, pending
from vime.data.accounting import account, account_of
from vime.data.journal import Journal
from vime.errors import DataError


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(tmp_path / "journal.sqlite")
    made.set_meta(epoch_size=4, mixed=False, first_group_id=0)
    return made


def take(journal: Journal, *group_ids: int, size: int = 4) -> None:
    journal.taken([pending(i, place=divmod(i, size)) for i in group_ids], 0)


def test_counts_are_by_stage_and_reason_and_the_oldest_in_flight_is_named(journal: Journal) -> None:
    take(journal, 0, 1, 2, 3)
    journal.trained(0, [pending(0)])
    journal.dropped([pending(1)], "filter: zero_std")
    journal.finished(finished(3))
    found = account_of(journal.path)
    assert found.is_exact
    assert {stage: n for stage, n in found.stages.items() if n} == {
        "taken": 1,
        "finished": 1,
        "trained": 1,
        "dropped": 1,
    }
    assert found.reasons == {"filter: zero_std": 1}
    assert found.oldest is not None and found.oldest.group_id == 2


def test_a_skipped_prompt_is_lost(journal: Journal) -> None:
    take(journal, 0, 1, 4, 5, 7)
    (gap, epoch) = account(journal).lost
    assert gap == "of the groups 0 to 7 3 are not in the journal: 2 to 3, 6"
    assert epoch == "epoch 0 has 2 of its 4 prompts, and the next one has begun"


def test_a_skip_at_the_front_is_lost_unless_the_journal_began_later(journal: Journal) -> None:
    take(journal, 2, 3)
    assert account(journal).lost == ["of the groups 0 to 3 2 are not in the journal: 0 to 1"]
    journal.set_meta(first_group_id=2)
    assert account(journal).is_exact


def test_a_group_that_a_resume_does_not_hold_is_lost(journal: Journal) -> None:
    take(journal, 0, 1)
    journal.rewind(journal.sync(), waiting=[0], unsure=False, version=1)
    assert account(journal).lost == [
        "group 1 (prompt 1 of epoch 0) was taken; the data source that was restored does not hold it"
    ]


def test_a_prompt_that_is_trained_on_twice_or_is_in_two_groups_is_doubled(journal: Journal) -> None:
    take(journal, 0, 1)
    journal.trained(0, [pending(0)])
    journal.trained(1, [pending(0)])
    journal.taken([pending(2, place=(0, 1))], 1)
    assert account(journal).doubled == [
        "group 0 trained on in rollouts 0 and 1",
        "prompt 1 of epoch 0 is in groups 1, 2",
    ]


def test_what_a_resume_has_undone_is_neither_lost_nor_doubled(journal: Journal) -> None:
    take(journal, 0)
    journal.trained(0, [pending(0)])
    mark = journal.sync()
    take(journal, 1, 2)
    journal.trained(1, [pending(1)])
    journal.rewind(mark, waiting=[], unsure=False, version=2)
    assert account(journal).is_exact
    take(journal, 1, 2)
    journal.trained(1, [pending(1), pending(2)])
    found = account(journal)
    assert found.is_exact and found.stages["trained"] == 3


def test_there_has_to_be_a_journal(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        account_of(tmp_path / "journal.sqlite")
