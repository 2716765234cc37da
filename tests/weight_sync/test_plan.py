"""The order of a weight sync, on fakes: who is called when, and what an error leaves behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from vime.errors import EngineDead, WeightSyncError
from vime.protocols import Completion, ProbeResult
from vime.types import VersionSpan
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance
from vime.wire import BucketMessage


class FakeEngine:
    """Notes what it is asked; fails at the step named by `fail_at`."""

    def __init__(self, log: list[str], name: str, fail_at: str = "") -> None:
        self.log, self.name, self.fail_at = log, name, fail_at
        self.log_prob = -1.0
        self.unfit: str | None = None
        self.error: Exception | None = None
        self.num_failures = 1_000

    def _note(self, step: str) -> None:
        self.log.append(f"{self.name} {step}")
        if step == self.fail_at and self.num_failures:
            self.num_failures -= 1
            raise self.error or WeightSyncError(f"{step} failed on tensor x")

    def pause(self, mode: str = "keep") -> None:
        self._note(f"pause {mode}")

    def begin_weights(self, version: int, transport: str, names: Sequence[str]) -> None:
        self._note(f"begin {version} {transport} {','.join(names)}")

    def receive(self, bucket: BucketMessage) -> None:
        self._note(f"receive {bucket.index}")

    def commit(self, version: int) -> dict[str, float]:
        self._note(f"commit {version}")
        return {"read": 1.0 if self.name == "e0" else 2.0}

    def resume(self) -> None:
        self._note("resume")

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        self._note("probe")
        completion = Completion(
            token_ids=(7, 8),
            log_probs=(self.log_prob, self.log_prob),
            finish_reason="length",
            weight_versions=(VersionSpan(1, 0, 2),),
        )
        return ProbeResult(tuple(tuple(p) for p in prompts), (completion,) * len(prompts))

    def mark_unfit(self, reason: str) -> None:
        self.unfit = reason


class FakeTrainer:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.scored: list[tuple[int, ...]] = []

    def weight_names(self) -> list[str]:
        return ["x", "y"]

    def weights(self, version: int) -> Iterator[BucketMessage]:
        for index in range(2):
            self.log.append(f"write {index}")
            yield BucketMessage(version, index, (), 10, {})

    def call_off_weights(self) -> None:
        self.log.append("call off")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        self.scored += [tuple(s) for s in sequences]
        return [np.array([np.nan, *([-1.0] * (len(s) - 1))], dtype=np.float32) for s in sequences]


def make(num_engines: int = 1, interval: int = 0, **engine: Any) -> tuple[WeightSync, list[str], list[FakeEngine], Any]:
    log: list[str] = []
    trainer = FakeTrainer(log)
    engines = [FakeEngine(log, f"e{i}", **engine) for i in range(num_engines)]
    sync = WeightSync(
        trainer,  # type: ignore[arg-type]
        engines,  # type: ignore[arg-type]
        transport="shm",
        probe_prompts=[(1, 2, 3)],
        probe_interval=interval,
        probe_tolerance=ProbeTolerance(1e-4),
    )
    return sync, log, engines, trainer


def test_the_order_of_a_sync() -> None:
    sync, log, _, trainer = make(interval=1)
    assert sync.publish() == sync.version == 1
    assert log[:3] == ["e0 pause keep", "e0 begin 1 shm x,y", "write 0"]
    assert set(log[3:5]) == {"e0 receive 0", "write 1"}, "at the same time"
    assert log[5:] == ["e0 receive 1", "e0 commit 1", "e0 resume", "e0 probe"]
    assert trainer.scored == [(1, 2, 3, 7, 8)]
    assert sync.metrics["weight_sync/bytes"] == 20
    assert sync.metrics["weight_sync/gather_seconds"] <= sync.metrics["weight_sync/seconds"]
    assert sync.metrics["weight_sync/probe_abs_diff_max"] == 0
    assert sync.publish() == 2
    assert sync.publish(5) == sync.version == 5


class FakeTurns:
    """Notes who has the devices."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def to_sync(self) -> None:
        self.log.append("to sync")

    def to_generation(self) -> None:
        self.log.append("to generation")

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        self.log.append("to scoring")
        yield
        self.log.append("back")


def test_sides_that_share_devices_change_places_around_the_sending_and_the_scoring() -> None:
    sync, log, engines, _ = make(interval=2)
    sync._turns = FakeTurns(log)  # type: ignore[assignment]
    sync.publish()
    assert log[:2] == ["to sync", "e0 pause keep"]
    assert log[6:] == [
        *("e0 receive 1", "e0 commit 1", "to generation", "e0 resume", "e0 probe", "to scoring", "back"),
    ]
    sync.publish()
    assert "to scoring" not in log[log.index("back") :]
    log.clear()
    engines[0].fail_at = "commit 3"
    with pytest.raises(WeightSyncError):
        sync.publish()
    assert log[-1] == "e0 commit 3"  # no KV cache, and nothing scheduled, over weights that were not committed


def test_a_bucket_is_written_while_engines_load_the_one_before_and_never_over_one_they_may_still_read() -> None:
    sync, log, engines, trainer = make(num_engines=3)
    written = [threading.Event() for _ in range(4)]

    def weights(version: int) -> Iterator[BucketMessage]:
        for index in range(4):
            log.append(f"write {index}")
            written[index].set()
            yield BucketMessage(version, index, (), 10, {})

    def waits_for_the_next(name: str) -> Callable[[BucketMessage], None]:
        def receive(bucket: BucketMessage) -> None:
            if bucket.index < 3:
                assert written[bucket.index + 1].wait(60), "the trainer waits for the engines"
            log.append(f"{name} receive {bucket.index}")

        return receive

    trainer.weights = weights
    for number, engine in enumerate(engines):
        engine.receive = waits_for_the_next(f"e{number}")  # type: ignore[method-assign]
    sync.publish()
    for index in range(2):
        received = max(log.index(f"e{number} receive {index}") for number in range(3))
        assert received < log.index(f"write {index + 2}"), "it lies in the same place"
    assert log.index("write 0") > max(i for i, entry in enumerate(log) if "begin" in entry)
    assert sync.metrics["weight_sync/read_seconds"] == 2.0, "of the slowest engine"


def test_the_probe_comes_first_and_then_every_nth_time() -> None:
    sync, log, _, _ = make(interval=3)
    probed = []
    for _ in range(6):
        log.clear()
        sync.publish()
        probed.append("e0 probe" in log)
    assert probed == [True, False, False, True, False, False]


@pytest.mark.parametrize("step", ["pause keep", "begin 1 shm x,y", "receive 1", "commit 1", "resume"])
def test_an_error_names_step_and_engine_and_the_version_does_not_count(step: str) -> None:
    sync, log, _, _ = make(num_engines=2, fail_at=step)
    with pytest.raises(WeightSyncError, match=r"engine 0.*failed on tensor x; engine 1"):
        sync.publish()
    assert sync.version == 0
    if step != "resume":
        assert not [entry for entry in log if "resume" in entry]


def test_a_dead_engine_is_a_failed_sync_with_its_cause() -> None:
    sync, _, engines, _ = make(num_engines=2)

    def dead(bucket: BucketMessage) -> None:
        raise EngineDead("the process is gone")

    engines[1].receive = dead  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="bucket 0: engine 1: the process is gone") as caught:
        sync.publish()
    assert isinstance(caught.value.__cause__, EngineDead)


def test_engines_that_wait_for_one_that_failed_are_told() -> None:
    sync, _, engines, trainer = make(num_engines=2)
    called_off = threading.Event()

    def wait_for_the_other(bucket: BucketMessage) -> None:
        raise WeightSyncError("called off" if called_off.wait(60) else "waited in vain")

    def dead(bucket: BucketMessage) -> None:
        raise EngineDead("the process is gone")

    trainer.call_off_weights = called_off.set
    engines[0].receive = wait_for_the_other  # type: ignore[method-assign]
    engines[1].receive = dead  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="engine 0: called off; engine 1: the process is gone"):
        sync.publish()


def test_when_the_writer_and_an_engine_fail_the_engine_says_why() -> None:
    sync, _, engines, trainer = make()

    def weights(version: int) -> Iterator[BucketMessage]:
        yield BucketMessage(version, 0, (), 10, {})
        raise WeightSyncError("bucket 0 did not reach every engine")

    trainer.weights = weights
    with pytest.raises(WeightSyncError, match=r"^bucket 0 did not reach every engine"):
        sync.publish()
    engines[0].fail_at = "receive 0"
    with pytest.raises(WeightSyncError, match="engine 0: receive 0 failed on tensor x"):
        sync.publish()


def test_a_probe_that_differs_fails_the_sync_and_marks_every_engine() -> None:
    sync, _, engines, _ = make(num_engines=2, interval=1)
    engines[1].log_prob = -1.01
    with pytest.raises(WeightSyncError, match=r"probe of version 1 failed on engine 1.*0\.01"):
        sync.publish()
    assert sync.version == 0
    assert all(engine.unfit for engine in engines)


@pytest.mark.parametrize("trouble", ["silent", "scoreless"])
def test_a_probe_that_shows_nothing_leaves_no_engine_fit(trouble: str) -> None:
    sync, _, engines, trainer = make(num_engines=2, interval=1)
    if trouble == "silent":
        engines[1].fail_at = "probe"
        engines[1].mark_unfit = lambda reason: engines[1]._note("probe")  # type: ignore[method-assign]
    else:
        trainer.score = lambda sequences: []
    with pytest.raises(WeightSyncError) as caught:
        sync.publish()
    assert engines[0].unfit
    if trouble == "silent":
        assert str(caught.value).count("engine 1: probe failed on tensor x") == 2, "neither hides the other"


def test_without_engines_or_without_prompts_to_probe_with_there_is_no_sync() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        make(num_engines=0)
    with pytest.raises(ValueError, match="no prompts"):
        WeightSync(
            FakeTrainer([]),  # type: ignore[arg-type]
            [FakeEngine([], "e")],  # type: ignore[list-item]
            transport="shm",
            probe_prompts=[],
            probe_interval=5,
            probe_tolerance=ProbeTolerance(1e-4),
        )


def test_closing_does_not_wait_for_an_engine_that_never_answers() -> None:
    sync, _, (engine,), _ = make()
    asked, answer, answered = threading.Event(), threading.Event(), threading.Event()

    def pause(mode: str = "keep") -> None:
        asked.set()
        answer.wait(60)
        answered.set()

    engine.pause = pause  # type: ignore[method-assign]

    def publish() -> None:
        with contextlib.suppress(RuntimeError):  # no further step can be handed to threads that are closed
            sync.publish()

    publishing = threading.Thread(target=publish)
    publishing.start()
    assert asked.wait(60)
    sync.close()
    assert not answered.is_set()
    answer.set()
    publishing.join(60)
    assert not publishing.is_alive()


class FakeRoster:
    """Two engines; those in `down` are being restarted."""

    def __init__(self) -> None:
        self.down: set[int] = set()
        self.num_waits = 0

    def present(self) -> list[int]:
        return [number for number in (0, 1) if number not in self.down]

    def lost(self, number: int, error: BaseException) -> bool:
        if not isinstance(error, EngineDead):
            return False
        self.down.add(number)
        return True

    def wait_whole(self) -> None:
        self.num_waits += 1
        self.down.clear()


def rostered(transport: str = "shm") -> tuple[WeightSync, list[str], list[FakeEngine], FakeRoster]:
    sync, log, engines, _ = make(2, interval=1)
    roster = FakeRoster()
    sync._transport, sync.roster = transport, roster
    for engine in engines:
        engine.error = EngineDead("nobody listens there")
    return sync, log, engines, roster


@pytest.mark.parametrize("step", ["pause keep", "begin 1 shm x,y", "receive 1", "commit 1", "resume", "probe"])
def test_an_engine_that_dies_in_a_sync_is_left_out_and_the_other_goes_on(step: str) -> None:
    sync, log, engines, roster = rostered()
    engines[0].fail_at = step
    assert sync.publish() == sync.version == 1
    assert roster.down == {0}
    assert log.count("e1 receive 1") == log.count("e1 resume") == 1
    assert "call off" not in log
    before = len(log)
    assert sync.publish() == 2
    assert not any(line.startswith("e0") for line in log[before:]), "nobody calls it until it is back"


def test_a_sync_without_engines_counts_and_the_one_that_comes_back_gets_the_weights_and_a_probe() -> None:
    sync, log, engines, _ = rostered()
    engines[0].fail_at = engines[1].fail_at = "receive 0"
    assert sync.publish() == 1
    assert log[-1] == "call off", "nobody takes what the trainer would send"
    assert sync.metrics == {}
    engines[1].fail_at = ""
    log.clear()
    sync.join(1, 7)
    assert [line for line in log if line.startswith("e1")] == [
        *("e1 pause keep", "e1 begin 7 shm x,y", "e1 receive 0", "e1 receive 1", "e1 commit 7", "e1 resume", "e1 probe")
    ]
    assert not any(line.startswith("e0") for line in log)
    assert sync.version == 1, "of all the others"
    engines[1].fail_at = "commit 7"
    with pytest.raises(EngineDead, match="engine 1 failed again"):
        sync.join(1, 7)


def test_a_broadcast_that_an_engine_failed_is_done_again_by_all_once_it_is_back() -> None:
    sync, log, engines, roster = rostered("gloo")
    engines[0].fail_at, engines[0].num_failures = "receive 0", 1
    assert sync.publish() == 1
    assert roster.num_waits == 2
    assert log.count("call off") == 1
    assert log.count("e0 commit 1") == log.count("e1 commit 1") == 1
    assert log.count("e1 begin 1 gloo x,y") == 2


def test_an_engine_that_fails_again_while_it_joins_a_broadcast_is_not_waited_for_by_its_own_keeper() -> None:
    sync, _, engines, roster = rostered("gloo")
    sync.publish()
    engines[0].fail_at, waits = "receive 1", roster.num_waits
    with pytest.raises(EngineDead, match="engine 0 failed again"):
        sync.join(0, 1)
    assert roster.down == {0} and roster.num_waits == waits + 1, "only before the sync"


def test_what_is_no_fault_of_the_engine_still_fails_the_sync() -> None:
    sync, _, engines, roster = rostered()
    engines[0].fail_at, engines[0].error = "receive 0", WeightSyncError("the checksum differs for x")
    with pytest.raises(WeightSyncError, match="engine 0: the checksum differs for x"):
        sync.publish()
    assert roster.down == set()
