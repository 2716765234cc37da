"""How both sides of shared devices start, on fakes: what is planned, who comes first, what is measured then."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.models.shapes import QWEN3_06B
from vime.config import ClusterConfig, Config, RolloutConfig
from vime.models import sharing
from vime.models.sharing import Sharing
from vime.observability.progress import RunProgress
from vime.observability.start_times import StartTimes
from vime.orchestration import sharing as sides
from vime.orchestration.placement import plan_layout
from vime.orchestration.sharing import UNKNOWN, DevicePlan, plan_devices, start_sides
from vime.platform import get_platform
from vime.protocols import DeviceUse

GIB = 1 << 30
STAY, SLEEP, TURNS = (Sharing(*way, 0.4) for way in ((False, False), (True, False), (True, True)))
NEED = sharing.Need(
    device=100 * GIB, step=50 * GIB, static=20 * GIB, away=GIB, late=10 * GIB, engine=10 * GIB, cache=30 * GIB
)


class World:
    """A fleet of one engine and a trainer, which note what they are asked; `used` is measured once both are there."""

    def __init__(self, used: int = 60) -> None:
        self.calls: list[str] = []
        self.used = used
        self.engines = [self]
        self.lock = threading.RLock()

    def wait_ready(self, timeout_s: float | None = None) -> str:
        self.calls.append("engines ready" if timeout_s is not None else "trainer ready")
        return "client"

    def preload(self) -> None:
        self.calls.append("trainer imports")

    def start(self) -> None:
        self.calls.append("trainer starts")

    def sleep(self, level: int) -> None:
        self.calls.append(f"engine sleeps at level {level}")

    def device_memory(self) -> DeviceUse:
        return DeviceUse(self.used * GIB, 100 * GIB)


def run(plan: DevicePlan | None, world: World, **cluster: Any) -> Any:
    config = Config(cluster=ClusterConfig(colocate=True, **cluster))
    both: Any = world
    return start_sides(config, plan, both, both, RunProgress(1), StartTimes())


def test_with_devices_of_their_own_both_sides_start_at_the_same_time() -> None:
    world = World()
    assert run(None, world) == ("client", None)
    assert world.calls == ["trainer starts", "engines ready", "trainer ready"]


@pytest.mark.parametrize("planned", [SLEEP, TURNS])
def test_on_shared_devices_the_engines_come_first_and_sleep_while_the_trainer_is_built(planned: Sharing) -> None:
    world = World(used=40)
    client, turns = run(DevicePlan(planned, NEED), world)
    assert client == "client" and turns is not None
    assert turns._trainer_leaves == planned.trainer_leaves
    assert world.calls[:2] == ["trainer imports", "engines ready"]
    assert world.calls[2:] == ["engine sleeps at level 2", "trainer starts", "trainer ready"]
    turns.close()


def test_what_fits_moves_nothing_and_what_turns_out_not_to_fit_does() -> None:
    world = World(used=60)
    assert run(DevicePlan(STAY, NEED), world)[1] is None
    assert world.calls == ["trainer imports", "engines ready", "trainer starts", "trainer ready"]
    world = World(used=62)
    turns = run(DevicePlan(STAY, NEED), world)[1]
    assert turns is not None and not turns._trainer_leaves
    assert world.calls[-1] == "engine sleeps at level 2"
    turns.close()


@pytest.fixture
def hf_config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of Qwen3-0.6B."""

    class Family:
        def settings(self, config: dict[str, Any]) -> Any:
            return QWEN3_06B

    monkeypatch.setattr(sides, "family_of", lambda config: Family())
    return {"dtype": "bfloat16"}


def test_the_plan_follows_from_the_device_and_the_engines_are_started_by_it(
    hf_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = get_platform("cuda")
    rollout = RolloutConfig(rollout_batch_size=64, n_samples_per_prompt=8, rollout_max_context_len=1280)

    def plan(device_gib: int, **cluster: Any) -> DevicePlan | None:
        monkeypatch.setattr(type(cuda), "total_memory_bytes", lambda self: device_gib * GIB)
        config = Config(cluster=ClusterConfig(colocate=True, **cluster), rollout=rollout)
        layout = plan_layout(config.cluster, with_engines=True)
        made = plan_devices(config, hf_config, layout, cuda, RunProgress(1))
        if made is not None:
            arguments = made.engine_arguments(config)
            assert arguments["enable_sleep_mode"] is (cluster.get("offload_rollout") is not False)
            assert arguments["gpu_memory_utilization"] == made.sharing.utilization
        return made

    large, small, unknown = plan(140), plan(24), plan(0)
    assert large is not None and not large.sharing.moves
    assert small is not None and small.sharing.trainer_leaves
    assert unknown == DevicePlan(UNKNOWN, None)
    stays = plan(140, offload_rollout=False)
    assert stays is not None and not stays.sharing.moves


def test_nothing_is_planned_where_nothing_is_shared_or_nothing_can_leave(hf_config: dict[str, Any]) -> None:
    for colocate, platform in ((False, "cuda"), (True, "cpu")):
        config = Config(cluster=ClusterConfig(colocate=colocate))
        layout = plan_layout(config.cluster, with_engines=True)
        assert plan_devices(config, hf_config, layout, get_platform(platform), RunProgress(1)) is None
