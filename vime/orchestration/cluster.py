"""Ray: started here with token authentication on the loopback, or joined; and the placement group of a layout."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import ray
from ray.util.placement_group import placement_group

from vime.config import ClusterConfig
from vime.errors import ConfigError
from vime.orchestration.placement import Layout
from vime.platform.base import Platform

_OBJECT_STORE_BYTES = 1 << 30  # a local run's batches are megabytes; Ray's default is 30 % of the memory


@contextmanager
def ray_cluster(cluster: ClusterConfig, platform: Platform, layout: Layout) -> Iterator[None]:
    """Connect to Ray for the duration of a run.

    Without --ray-address a single-node cluster is started and ended here, guarded by a token (ray_environment.py).
    """
    if cluster.ray_address is None:
        options: dict[str, Any] = {
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": _OBJECT_STORE_BYTES,
            "num_cpus": cluster.num_cpus or max(os.cpu_count() or 1, layout.num_devices),
        }
    else:
        options = {"address": cluster.ray_address}
    # Workers are spawned with the driver's module path, so that hooks given by dotted path import there too.
    options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}}
    ray.init(logging_level=logging.WARNING, log_to_driver=True, **options)
    # ray.init takes SIGTERM to print a stack and die at once, which would leave the run's processes to find out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt_once)
    try:
        if (nodes := sum(node["Alive"] for node in ray.nodes())) > 1:  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"--ray-address: that cluster has {nodes} nodes, but engines and the router listen on the loopback "
                "address, so a run stays on one node; join a cluster of one"
            )
        have = ray.cluster_resources().get(platform.ray_resource, 0)  # type: ignore[no-untyped-call]
        if have < layout.num_devices:
            raise ConfigError(
                f"the run needs {layout.num_devices} {platform.ray_resource} devices "
                f"({len(layout.trainer_devices)} to train, {sum(map(len, layout.engine_devices))} to generate), "
                f"Ray has {have:g}; use --colocate or fewer of --actor-num-gpus-per-node and --rollout-num-gpus"
            )
        yield
    finally:
        ray.shutdown()


def create_placement_group(platform: Platform, layout: Layout) -> Any:
    """Reserve one bundle per device, packed on as few nodes as possible. Blocks until it is there.

    Returns: None where nothing is to be placed (supervised samples alone).
    """
    if not layout.num_devices:
        return None
    bundle = {platform.ray_resource: 1.0}
    if platform.ray_resource != "CPU":
        bundle["CPU"] = 1.0
    group = placement_group([dict(bundle) for _ in range(layout.num_devices)], strategy="PACK")
    ray.get(group.ready(), timeout=300)
    return group


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the run as ctrl-C does; further signals would only interrupt the ending of its processes."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print("vime: stopping", file=sys.stderr, flush=True)
    raise KeyboardInterrupt
