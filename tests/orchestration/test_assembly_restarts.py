"""Where a restarted engine waits for its place on devices that it shares with the trainer."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vime.orchestration.assembly import _keep_going


@pytest.mark.parametrize("waits_for_all", [False, True])
def test_a_restart_that_a_sync_waits_for_does_not_wait_for_the_trainer(waits_for_all: bool) -> None:
    places: list[Any] = []

    class Fleet:
        roster = None

        def keep_going(self, client: Any, give_weights: Any, place: Any) -> None:
            places.append(place())

    trainer: Any = SimpleNamespace(lock=threading.RLock(), last_trained=None)
    plan: Any = SimpleNamespace(start=0, layout=SimpleNamespace(shared=True))
    sync: Any = SimpleNamespace(waits_for_all=waits_for_all, roster=None)
    fleet: Any = Fleet()
    client: Any = SimpleNamespace(note_version=print)
    _keep_going(plan, fleet, client, trainer, sync, None)
    (place,) = places
    assert isinstance(place, nullcontext) if waits_for_all else place is trainer.lock
