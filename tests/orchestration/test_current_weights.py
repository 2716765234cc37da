"""The weights of an engine that was restarted, and who waits for whom."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.orchestration.test_keeper import POLICY, FakeLife
from vime.errors import EngineDead
from vime.orchestration.current_weights import CurrentWeights
from vime.orchestration.keeper import Keeper, keep_engine_state
from vime.orchestration.restarts import RestartBudget
from vime.orchestration.roster import EngineState, Roster


class World:
    """A trainer, a weight sync, and an engine whose keeper brings it the weights."""

    def __init__(self) -> None:
        self.lock, self.joined, self.told = threading.RLock(), list[tuple[int, int]](), list[int]()
        self.roster = Roster(
            2,
            lambda number, error: True,
            lambda number, cause: self.keeper.condemn(cause),
            lambda number: self.keeper.wait_ended(),
        )
        self.trainer: Any = SimpleNamespace(lock=self.lock, last_trained=3)
        self.sync: Any = SimpleNamespace(version=5, join=lambda *what: self.joined.append(what))
        self.life = FakeLife()
        self.keeper = Keeper(
            "engine 0",
            self.life,
            RestartBudget(POLICY),
            on_state=keep_engine_state(self.roster, 0),
            on_end=self.roster.fail,
        )

    def weights(self, **settings: Any) -> CurrentWeights:
        given = {"tells_versions": True, "num_serving": lambda: 1, "is_joining": self.roster.is_joining} | settings
        return CurrentWeights(self.trainer, self.sync, start=0, on_version=self.told.append, **given)

    def wait(self, state: EngineState) -> None:
        with self.roster._changed:
            assert self.roster._changed.wait_for(lambda: self.roster._states[0] is state, timeout=600)


def test_a_weight_sync_does_not_wait_for_an_engine_that_waits_for_the_sync_to_end() -> None:
    world = World()
    weights = world.weights()
    world.life.join = lambda: weights.give(0)  # type: ignore[method-assign]
    with world.lock:  # a weight sync has the trainer
        world.keeper.start()
        world.life.failures.put("killed")
        world.wait(EngineState.JOINING)
        assert world.roster.lost(0, EngineDead("it died again"))
        assert world.life.calls.count("end") == 2, "nothing is left of it when the sync goes on, or is done again"
        assert not world.joined
    world.wait(EngineState.SERVING)
    assert world.joined == [(0, 5)] and not world.told
    world.keeper.close()


def test_an_engine_that_says_no_versions_gets_newer_weights_only_where_no_other_serves() -> None:
    world = World()
    world.roster.set(0, EngineState.JOINING)
    world.sync.version = 4
    others = iter((1, 1, 0))
    world.weights(tells_versions=False, num_serving=lambda: next(others)).give(0)
    assert world.joined == [(0, 5)] and world.told == [5] and next(others, None) is None


def test_an_engine_that_does_not_wait_any_more_gets_none() -> None:
    world = World()
    with pytest.raises(EngineDead, match="engine 0 failed again before it had its weights"):
        world.weights().give(0)
    assert not world.joined
