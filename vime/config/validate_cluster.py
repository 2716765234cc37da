"""Checks of where a run's processes go: layout, devices, transport, engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vime.config import ClusterConfig, Config
from vime.config.critic_ranks import critic_ranks
from vime.config.modes import generates, trains


def training_ranks(config: Config) -> int:
    """Processes that train."""
    return config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node


def engine_devices(cluster: ClusterConfig) -> int:
    """Devices of all engines that the run starts."""
    if cluster.rollout_num_gpus is not None:
        return cluster.rollout_num_gpus
    if cluster.colocate:
        return cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    return cluster.rollout_num_gpus_per_engine


def check_cluster(config: Config, *, platform: str, transports: Sequence[str], devices: int | None) -> Iterator[str]:
    """Problems of the layout, the transport and the engines.

    Args:
        platform: its name.
        transports: weight transports it can do.
        devices: of this node; None where they do not limit the run.
    """
    cluster, wanted = config.cluster, config.sync.update_weight_transport
    if cluster.actor_num_nodes > 1 and cluster.ray_address is None:
        yield (
            f"--actor-num-nodes is {cluster.actor_num_nodes}, but the Ray that is started here has one node; start Ray "
            "on every node and give --ray-address (docs/multi_node.md), or use 1"
        )
    if wanted != "auto" and wanted not in transports:
        yield (
            f"--update-weight-transport is {wanted}, which the {platform} platform cannot do; "
            f"use one of {', '.join(transports)}, or auto"
        )
    if not generates(config):
        return
    if cluster.rollout_external_engine_addrs:
        yield from _external_engines(config)
        return
    per_engine, engines = cluster.rollout_num_gpus_per_engine, engine_devices(cluster)
    ranks = training_ranks(config)
    if per_engine > 0 and engines % per_engine:
        yield (
            f"--rollout-num-gpus is {engines}, which {per_engine} devices per engine (--rollout-num-gpus-per-engine) "
            f"do not divide; use a multiple of {per_engine}"
        )
    if cluster.colocate and cluster.actor_num_nodes > 1 and cluster.actor_num_gpus_per_node % max(per_engine, 1):
        yield (
            f"--rollout-num-gpus-per-engine is {per_engine}, but a node has --actor-num-gpus-per-node "
            f"{cluster.actor_num_gpus_per_node}, so that an engine would lie on two nodes; use a divisor of it"
        )
    if not trains(config):
        ranks = 0
    own = critic_ranks(config) if ranks else None
    critic = 0 if own is None else own.total
    needed = critic + (max(ranks, engines) if cluster.colocate else ranks + engines)
    if devices is not None and needed > devices:
        yield (
            f"the run needs {needed} devices ({ranks} to train, {engines} for engines"
            f"{', shared' if cluster.colocate else ''}{f', {critic} for the critic' if critic else ''}), but this node "
            f"has {devices}; use fewer, or --colocate"
        )


def _external_engines(config: Config) -> Iterator[str]:
    cluster = config.cluster
    seen: set[str] = set()
    for address in cluster.rollout_external_engine_addrs:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            yield f"--rollout-external-engine-addrs holds {address!r}, which is not host:port, such as 10.0.0.5:8000"
        if address in seen:
            yield f"--rollout-external-engine-addrs names {address} twice"
        seen.add(address)
    path = cluster.rollout_external_engine_key_file
    if path is None:
        yield "--rollout-external-engine-key-file is required with external engines: the file given to `vime engine`"
    elif problem := key_file_problem(Path(path)):
        yield f"--rollout-external-engine-key-file: {problem}"
    if cluster.colocate:
        yield "--colocate shares the trainer's devices with engines of this run; external engines have their own"
    for name in config.vllm:
        yield (
            f"--vllm-{name.replace('_', '-')} is given, but external engines have their own settings; give it "
            "to `vime engine`"
        )


def key_file_problem(path: Path) -> str | None:
    """What is wrong with a file that holds a key, or None."""
    if not path.is_file():
        return f"{path} is not a file"
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        return f"{path} has mode {mode:04o}, so others may read it; chmod 600 it"
    if not path.read_text(encoding="utf-8").strip():
        return f"{path} is empty"
    return None
