"""How far ahead of the trainer groups are begun."""

from __future__ import annotations

import pytest

from vime.rollout.pace import Pace


def test_it_shrinks_to_one_while_rollouts_lie_finished_and_grows_while_the_trainer_waits() -> None:
    pace = Pace(3)
    seen = [pace.ahead]
    for _ in range(3):
        pace.leaves(1)
        seen.append(pace.ahead)
    pace.leaves(0)
    for _ in range(3):
        pace.waits(0)
        seen.append(pace.ahead)
    assert seen == [3, 2, 1, 1, 2, 3, 3]


def test_a_trainer_that_waits_gets_a_rollout_however_far_behind_the_engines_are() -> None:
    pace = Pace(4)
    for _ in range(3):
        pace.leaves(1)
    pace.waits(3)
    assert pace.ahead == 3, "so that ahead + 1 - 3 rollouts may be out"


def test_it_stays_as_far_ahead_as_engines_keep_their_weights() -> None:
    pace = Pace(5, interval=3)
    for _ in range(4):
        pace.leaves(1)
    assert pace.ahead == 3
    pace = Pace(2, interval=3)
    pace.leaves(1)
    assert pace.ahead == 2, "the bound counts"


@pytest.mark.parametrize("most", [0, 1])
def test_a_bound_of_no_or_one_version_stays(most: int) -> None:
    pace = Pace(most)
    pace.leaves(1)
    assert pace.ahead == most
    pace.waits(most)
    assert pace.ahead == most
