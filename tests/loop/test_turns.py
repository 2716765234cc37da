"""Trainer and engines on the same devices, on fakes: who is called in which order, and what errors say."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from vime.errors import EngineDead, EngineError, TrainingError
from vime.loop.turns import DeviceTurns
from vime.protocols import TRAINER_PARTS, DeviceUse

GIB = 1 << 30


class Device:
    """A trainer and an engine that share 100 GiB, and note what they are asked; both refuse to take what is not free.

    The trainer has 10 GiB of weights and 60 of state, the engine 10 and 75.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes = {"weights": 10, "state": 60, "engine weights": 10, "engine kv_cache": 75}
        self.present = {"weights", "state"}
        self.fails: dict[str, Exception] = {}
        self.level = 2

    @property
    def used(self) -> int:
        return sum(self.sizes[name] for name in self.present)

    def take(self, name: str, error: type[Exception]) -> None:
        assert name not in self.present, f"{name} was there already"
        self.present.add(name)
        if self.used > 100:
            raise error("out of memory")

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]

    # Engine

    def sleep(self, level: int) -> None:
        self.note(f"sleep {level}")
        self.level = level
        self.present -= {"engine weights", "engine kv_cache"}

    def wake(self, tags: Sequence[str]) -> None:
        self.note(f"wake {','.join(tags)}")
        for tag in tags:
            self.take(f"engine {tag}", EngineError)

    # Trainer

    def offload(self, parts: Sequence[str] = TRAINER_PARTS) -> None:
        self.note(f"offload {','.join(parts)}")
        self.present -= set(parts)

    def onload(self, parts: Sequence[str] = TRAINER_PARTS) -> None:
        self.note(f"onload {','.join(parts)}")
        for part in parts:
            if part not in self.present:
                self.take(part, TrainingError)

    def device_memory(self) -> DeviceUse:
        return DeviceUse(self.used * GIB, 100 * GIB)


def make(*, trainer_leaves: bool = True) -> tuple[DeviceTurns, Device]:
    device = Device()
    engine: Any = device
    return DeviceTurns(engine, [engine], trainer_leaves=trainer_leaves), device


def test_each_side_makes_room_before_the_other_takes_it() -> None:
    turns, device = make()
    turns.to_sync()
    assert device.present == {"weights", "engine weights"}
    turns.to_generation()
    assert device.present == {"engine weights", "engine kv_cache"}
    turns.to_training(weights_follow=True)
    assert device.present == {"weights", "state"}
    assert device.calls == [
        *("offload state", "wake weights", "offload weights", "wake kv_cache"),
        *("sleep 2", "onload weights,state"),
    ]
    metrics = turns.take_metrics()
    assert metrics["memory/device_used_in_generation_bytes"] == 85 * GIB
    assert metrics["memory/device_used_in_training_bytes"] == 70 * GIB
    assert {f"perf/{what}_time" for what in ("sleep", "wake", "offload", "onload")} < set(metrics)
    assert turns.take_metrics() == {}


def test_engines_keep_their_weights_where_no_sync_follows() -> None:
    turns, device = make()
    turns.to_generation()
    device.calls.clear()
    turns.to_training(weights_follow=False)
    turns.to_generation()
    turns.to_generation()  # the engines have the devices already
    assert device.calls == [
        *("sleep 1", "onload weights,state"),
        *("offload state,weights", "wake weights", "wake kv_cache"),
    ]


def test_a_second_sync_in_a_row_gives_the_trainer_its_place_back_first() -> None:
    turns, device = make()
    for _ in range(2):
        turns.to_sync()
        turns.to_generation()
    assert device.present == {"engine weights", "engine kv_cache"}
    assert device.calls[4:7] == ["sleep 2", "onload weights,state", "offload state"]


def test_scores_are_computed_while_engines_sleep_and_keep_what_is_being_verified() -> None:
    turns, device = make()
    turns.to_generation()
    device.calls.clear()
    with turns.scoring():
        assert device.present == {"weights"} and device.level == 1
    assert device.present == {"engine weights", "engine kv_cache"}
    assert device.calls == [
        *("sleep 1", "onload weights", "offload weights", "wake weights", "wake kv_cache"),
    ]


def test_a_trainer_that_stays_gives_back_what_is_cached_alone() -> None:
    turns, device = make(trainer_leaves=False)
    device.sizes["engine kv_cache"] = 15
    turns.to_sync()
    turns.to_generation()
    turns.to_training(weights_follow=True)
    assert device.calls == ["offload ", "wake weights", "offload ", "wake kv_cache", "sleep 2"]


def test_engines_without_room_to_wake_say_how_much_there_is() -> None:
    turns, _ = make(trainer_leaves=False)
    turns.to_sync()
    with pytest.raises(EngineError, match=r"engine 0 could not wake its kv_cache: out of memory; .* --offload-train"):
        turns.to_generation()


def test_an_engine_that_died_in_its_sleep_is_called_dead() -> None:
    turns, device = make()
    device.fails["wake weights"] = EngineDead("nobody listens")
    with pytest.raises(EngineDead, match=r"engine 0 could not wake its weights: nobody listens$"):
        turns.to_sync()


def test_a_trainer_without_room_says_so() -> None:
    turns, device = make()
    turns.to_generation()
    device.sizes["state"] = 95
    with pytest.raises(TrainingError, match="out of memory"):
        turns.to_training(weights_follow=True)


class FakeRoster:
    """One engine, which is being restarted once it was lost; what it held is free then."""

    def __init__(self, device: Device) -> None:
        self.is_there, self.device = True, device

    def present(self) -> list[int]:
        return [0] if self.is_there else []

    def lost(self, number: int, error: BaseException) -> bool:
        if not isinstance(error, EngineDead):
            return False
        self.is_there = False
        self.device.present -= {"engine weights", "engine kv_cache"}
        return True

    def wait_whole(self) -> None:
        raise AssertionError("nobody needs all engines here")


@pytest.mark.parametrize("call", ["sleep 2", "wake weights", "wake kv_cache"])
def test_an_engine_that_dies_asleep_or_on_its_way_is_left_out_until_it_is_back(call: str) -> None:
    turns, device = make()
    turns.roster = roster = FakeRoster(device)
    if call == "sleep 2":
        turns.to_generation()
    device.fails[call] = EngineDead("nobody listens there")
    turns.to_training(weights_follow=True)
    turns.to_sync()
    turns.to_generation()
    assert not roster.is_there
    device.fails.clear()
    assert device.present == set(), "the trainer is away"
    device.calls.clear()
    roster.is_there = True
    with turns.generating():
        turns.to_training(weights_follow=True)
    assert device.calls == ["sleep 2", "onload weights,state"]


def test_a_restart_waits_until_the_trainer_is_away_and_keeps_it_away() -> None:
    turns, _ = make()
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def restart() -> None:
        with turns.generating():
            order.append("restart")
            inside.set()
            leave.wait(60)
            order.append("restarted")

    restarting = threading.Thread(target=restart, daemon=True)
    restarting.start()
    turns.to_sync()
    order.append("sync")
    turns.to_generation()
    assert inside.wait(60)

    def train() -> None:
        turns.to_training(weights_follow=False)
        order.append("training")

    training = threading.Thread(target=train, daemon=True)
    training.start()
    leave.set()
    restarting.join(60)
    training.join(60)
    assert order == ["sync", "restart", "restarted", "training"]
