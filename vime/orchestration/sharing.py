"""Trainer and engines on the same devices: what moves, how they start, and who then takes turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.config import Config
from vime.config.dtype import run_dtype
from vime.engine.vllm.client import RouterClient
from vime.loop.turns import DeviceTurns
from vime.models import family_of
from vime.models.run_memory import need_of, wishes_of
from vime.models.sharing import Need, Sharing, decide, describe, settle
from vime.observability.progress import RunProgress
from vime.observability.start_times import StartTimes
from vime.orchestration.fleet import Fleet
from vime.orchestration.placement import Layout
from vime.orchestration.workers import TrainerGroup
from vime.platform.base import Platform
from vime.protocols import Engine

UNKNOWN = Sharing(engines_sleep=True, trainer_leaves=True, utilization=0.85)
"""Where the driver has no device to look at: both sides take turns."""


@dataclass(slots=True)
class DevicePlan:
    """Made before the engines start; `build_trainer` follows once they serve."""

    sharing: Sharing
    need: Need | None
    """None where the devices' memory is not known here."""

    def engine_arguments(self, config: Config) -> dict[str, Any]:
        """AsyncEngineArgs fields that follow; a user's own win."""
        may_sleep = self.sharing.engines_sleep or wishes_of(config).offload_rollout is not False
        return {"gpu_memory_utilization": self.sharing.utilization, "enable_sleep_mode": may_sleep}

    def build_trainer(
        self, config: Config, trainer: TrainerGroup, engines: Sequence[Engine], progress: RunProgress
    ) -> DeviceTurns | None:
        """Build the trainer beside engines that serve, and sleep if they are to.

        Returns: what changes the sides' places from now on; None where nothing moves.
        """
        if self.sharing.engines_sleep:
            _sleep(engines)
        trainer.start()
        trainer.wait_ready()
        sharing, memory = self.sharing, trainer.device_memory()
        if self.need is not None and memory is not None:
            sharing = settle(sharing, self.need, wishes_of(config), used=memory.used)
        if sharing != self.sharing:
            progress.message(f"more is in use than was estimated: {sharing}")
        if not sharing.moves:
            return None
        if not self.sharing.engines_sleep:
            _sleep(engines)
        return DeviceTurns(trainer, engines, trainer_leaves=sharing.trainer_leaves, lock=trainer.lock)


def plan_devices(
    config: Config, hf_config: Mapping[str, Any], layout: Layout, platform: Platform, progress: RunProgress
) -> DevicePlan | None:
    """What moves on devices that trainer and engines share; None where they share none, or no device but the host.

    Raises: ConfigError if they do not fit, however they take turns.
    """
    if not layout.shared or not layout.engine_devices or platform.turns_problem is not None:
        return None
    device_bytes = platform.total_memory_bytes()
    if not device_bytes:
        progress.message(f"the driver sees no device, so trainer and engines take turns: {UNKNOWN}")
        return DevicePlan(UNKNOWN, None)
    need = need_of(
        config,
        family_of(hf_config).settings(hf_config),
        run_dtype(config.megatron, hf_config),
        world_size=len(layout.trainer_devices),
        device_bytes=device_bytes,
    )
    sharing = decide(need, wishes_of(config))
    progress.message(f"devices of {describe(need)} are shared: {sharing}")
    return DevicePlan(sharing, need)


def start_sides(
    config: Config,
    devices: DevicePlan | None,
    trainer: TrainerGroup,
    fleet: Fleet | None,
    progress: RunProgress,
    times: StartTimes,
) -> tuple[RouterClient | None, DeviceTurns | None]:
    """Wait for engines and trainer, at the same time where each has its own devices.

    On shared ones the engines come first: vLLM measures the device when it starts, and fails, or makes its KV cache
    smaller, where another process takes or gives memory meanwhile.

    Returns: the engines' client, and who takes turns on the devices.
    """
    if devices is None:
        trainer.start()
    else:
        trainer.preload()
    client = None
    if fleet is not None:
        with times.part("engines"):
            client = fleet.wait_ready(config.log.engine_start_timeout_s)
    with times.part("trainer"):
        if devices is not None and fleet is not None:
            return client, devices.build_trainer(config, trainer, fleet.engines, progress)
        trainer.wait_ready()
        return client, None


def _sleep(engines: Sequence[Engine]) -> None:
    for engine in engines:
        engine.sleep(2)  # a weight sync comes first
