"""Engines and router that fail, on fakes of their processes: limits, backoff, order, and what others see."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from vime.errors import EngineDead, EngineError, TrainingError, WeightSyncError
from vime.orchestration.keeper import Keeper, NodeLeft, keep_engine_state, keep_router_state
from vime.orchestration.restarts import RestartBudget, RestartPolicy
from vime.orchestration.roster import EngineState, Roster

POLICY = RestartPolicy(max_restarts=3, window_s=100.0, backoff_s=0.0)


def test_backoff_doubles_and_restarts_are_forgotten_after_the_window() -> None:
    times = iter((0.0, 10.0, 20.0, 30.0, 40.0, 99.0, 100.0))
    budget = RestartBudget(RestartPolicy(max_restarts=4, window_s=100.0, backoff_s=2.0), clock=lambda: next(times))
    waits = [budget.take() for _ in range(7)]
    # At 100 the first one counts no more, and those that were refused never did.
    assert waits == [0.0, 2.0, 4.0, 8.0, None, None, 8.0]
    assert RestartBudget(RestartPolicy(max_restarts=0, window_s=1.0, backoff_s=1.0)).take() is None
    long = RestartBudget(RestartPolicy(max_restarts=50, window_s=1e9, backoff_s=1.0))
    assert max(long.take() or 0.0 for _ in range(50)) == 60.0


class FakeLife:
    """Fails when a test says so; each call is noted."""

    def __init__(self, calls: list[str] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.failures: queue.Queue[str] = queue.Queue()
        self.at: dict[str, list[Exception]] = {}

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.at.get(name):
            raise self.at[name].pop(0)

    def failure(self) -> str | None:
        try:
            return self.failures.get(timeout=0.01)
        except queue.Empty:
            return None

    def start(self) -> None:
        self._note("start")

    def end(self) -> None:
        self._note("end")

    def join(self) -> None:
        self._note("join")

    def enlist(self) -> None:
        self._note("enlist")

    def delist(self) -> None:
        self._note("delist")


class Kept:
    """A roster of one engine (and a second that nobody keeps), whose keeper runs."""

    def __init__(self, policy: RestartPolicy = POLICY) -> None:
        self.life, self.sick = FakeLife(), False
        self.beside_the_question: Callable[[], object] = lambda: None
        self.roster = Roster(
            2,
            self._is_sick,
            lambda number, cause: self.keeper.condemn(cause),
            lambda number: self.keeper.wait_ended(),
        )
        self.changed = threading.Condition()
        self.states: list[EngineState] = []
        tell = keep_engine_state(self.roster, 0)

        def on_state(state: EngineState) -> None:
            with self.changed:
                self.states.append(state)
                tell(state)
                self.changed.notify_all()

        def on_end(error: BaseException) -> None:
            with self.changed:
                self.roster.fail(error)
                self.changed.notify_all()

        self.keeper = Keeper("engine 0", self.life, RestartBudget(policy), on_state=on_state, on_end=on_end)
        self.keeper.start()

    def _is_sick(self, number: int, error: BaseException) -> bool:
        self.beside_the_question()
        return self.sick

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=60), (self.states, self.life.calls)

    def has_ended(self) -> bool:
        try:
            self.roster.check()
        except Exception:
            return True
        return False


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_an_engine_that_fails_is_ended_started_and_verified_before_it_serves(kept: Kept) -> None:
    kept.life.failures.put("it ended with exit code -9")
    kept.wait(lambda: kept.states[-1:] == [EngineState.SERVING])
    assert kept.life.calls == ["delist", "end", "start", "join", "enlist"]
    assert kept.states == [EngineState.DOWN, EngineState.JOINING, EngineState.SERVING]
    assert kept.roster.restarts == {"engine": 1}
    assert not kept.roster.is_under_way()
    kept.keeper.close()
    (span,) = kept.keeper.spans.take()
    assert (span["name"], span["cause"]) == ("restart", "it ended with exit code -9")


def test_a_failed_start_or_a_failed_probe_is_a_restart_too_and_the_last_cause_ends_the_run(kept: Kept) -> None:
    kept.life.at = {
        "start": [EngineError("no room")],
        "join": [WeightSyncError("checksum differs"), WeightSyncError("the probe failed")],
    }
    kept.life.failures.put("frozen")
    kept.wait(kept.has_ended)
    assert kept.life.calls.count("start") == 3
    assert "enlist" not in kept.life.calls
    with pytest.raises(EngineDead, match=r"(?s)engine 0 .* 3 restarts within 100 s .*max-restarts.*the probe failed"):
        kept.roster.present()
    with pytest.raises(EngineDead):
        kept.roster.wait_whole()


def test_what_is_wrong_with_the_trainer_ends_the_run_as_it_is(kept: Kept) -> None:
    kept.life.at = {"join": [TrainingError("training rank 0: its process died")]}
    kept.life.failures.put("killed")
    kept.wait(kept.has_ended)
    with pytest.raises(TrainingError, match="rank 0"):
        kept.roster.check()


def test_an_engine_whose_node_has_left_is_done_without(kept: Kept) -> None:
    kept.life.at = {"start": [NodeLeft("its node has left the cluster")]}
    kept.life.failures.put("its worker died")
    kept.wait(lambda: kept.states[-1:] == [EngineState.GIVEN_UP])
    assert kept.roster.present() == [1]
    kept.roster.wait_whole()
    assert not kept.roster.is_under_way()
    assert kept.roster.lost(0, EngineDead("gone")), "whoever calls it still is not to fail"


def test_an_engine_that_fails_in_a_call_is_condemned_once(kept: Kept) -> None:
    assert not kept.roster.lost(0, EngineError("the checksum differs")), "no fault of the engine"
    kept.sick = True
    assert kept.roster.lost(0, EngineDead("nobody listens"))
    assert kept.life.calls[:2] == ["delist", "end"], "nothing is left of it when others go on"
    kept.wait(lambda: kept.states[-1:] == [EngineState.SERVING])
    assert kept.roster.present() == [0, 1]
    assert kept.roster.restarts == {"engine": 1}


def test_an_engine_that_was_restarted_while_it_was_asked_how_it_is_is_not_ended_again(kept: Kept) -> None:
    def notice_and_restart() -> None:
        kept.life.failures.put("frozen")
        kept.wait(lambda: kept.states[-1:] == [EngineState.SERVING])

    kept.sick, kept.beside_the_question = True, notice_and_restart
    assert kept.roster.lost(0, EngineError("no answer")), "its new life has what the caller was to bring"
    assert kept.roster.serving() == [0, 1]
    kept.keeper.close()
    assert kept.life.calls.count("end") == 1


def test_an_engine_that_fails_while_it_gets_its_weights_waits_for_nobody(kept: Kept) -> None:
    """Its keeper's thread runs that sync, and would wait for itself."""
    kept.sick = True
    seen: list[bool] = []
    joined = kept.life.join

    def join() -> None:
        joined()
        if not seen:
            seen.append(kept.roster.lost(0, EngineDead("it died again")))
            raise EngineDead("it died again")

    kept.life.join = join  # type: ignore[method-assign]
    kept.life.failures.put("killed")
    kept.wait(lambda: kept.states[-1:] == [EngineState.SERVING])
    assert seen == [True]
    assert kept.life.calls.count("start") == 2


def test_who_needs_all_engines_waits_for_a_restart(kept: Kept) -> None:
    entered = threading.Event()
    kept.roster.set(1, EngineState.DOWN)

    def wait() -> None:
        kept.roster.wait_whole()
        entered.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert not entered.is_set()
    kept.roster.set(1, EngineState.JOINING)
    waiting.join(60)
    assert entered.is_set()


def test_a_router_that_is_down_is_an_outage_and_counted_when_it_is_back() -> None:
    roster = Roster(1, lambda number, error: False)
    tell = keep_router_state(roster)
    assert not roster.is_under_way()
    tell(EngineState.DOWN)
    tell(EngineState.JOINING)
    assert roster.is_under_way()
    tell(EngineState.SERVING)
    assert not roster.is_under_way()
    assert roster.restarts["router"] == 1
    assert roster.restarts["engine"] == 0
