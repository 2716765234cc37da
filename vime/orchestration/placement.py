"""Which devices train and which generate: a pure plan, then a Ray placement group."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config import ClusterConfig
from vime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices are numbered bundles of one placement group."""

    num_devices: int
    trainer_devices: tuple[int, ...]
    """One per training rank."""
    engine_devices: tuple[tuple[int, ...], ...]
    """One tuple per engine."""
    shared: bool
    """Trainer and engines take turns on the same devices."""


def plan_layout(cluster: ClusterConfig, *, with_engines: bool, with_trainer: bool = True) -> Layout:
    """The devices of every trainer rank and engine.

    Args:
        with_engines: False for runs that generate nothing (supervised training, replays).
        with_trainer: False for runs that only generate; the engines are then as many as with a trainer.
    Raises: ConfigError when the engines do not divide the devices.
    """
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    trainer = tuple(range(ranks)) if with_trainer else ()
    if not with_engines:
        return Layout(len(trainer), trainer, (), shared=False)
    wanted = cluster.rollout_num_gpus
    devices = wanted if wanted is not None else (ranks if cluster.colocate else 1)
    per_engine = cluster.rollout_num_gpus_per_engine
    if devices < 1 or devices % per_engine:
        raise ConfigError(
            f"--rollout-num-gpus is {devices}, which {per_engine} devices per engine (--rollout-num-gpus-per-engine) "
            f"do not divide; use a multiple of {per_engine}"
        )
    first = 0 if cluster.colocate else len(trainer)
    engines = tuple(
        tuple(range(first + e * per_engine, first + (e + 1) * per_engine)) for e in range(devices // per_engine)
    )
    return Layout(max(len(trainer), first + devices), trainer, engines, shared=cluster.colocate and with_trainer)
