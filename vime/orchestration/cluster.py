"""Ray: started here with token authentication on the loopback, or joined; and the devices of a run, reserved."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import ray
from ray._private import services, utils
from ray._private.state import available_resources_per_node
from ray.exceptions import AuthenticationError, GetTimeoutError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.config import ClusterConfig
from vime.errors import ConfigError, VimeError
from vime.orchestration.placement import Layout, Node, Placement, place
from vime.platform.base import Platform

_log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 1 << 30  # a local run's batches are megabytes; Ray's default is 30 % of the memory
_RESERVE_TIMEOUT_S = 300.0


@contextmanager
def ray_cluster(cluster: ClusterConfig, layout: Layout) -> Iterator[None]:
    """Connect to Ray for the duration of a run.

    Without --ray-address a single-node cluster is started and ended here, guarded by a token (ray_environment.py).
    Raises: ConfigError if there is no cluster to join; VimeError if Ray does not start here.
    """
    # Workers get the driver's module path, so that hooks given by dotted path import there too.
    modules = os.pathsep.join(p or os.getcwd() for p in sys.path)
    if cluster.ray_address is None:
        options: dict[str, Any] = {
            "address": "local",  # never a cluster that happens to run on this machine
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": _OBJECT_STORE_BYTES,
            "num_cpus": cluster.num_cpus or max(os.cpu_count() or 1, layout.num_devices),
        }
    else:
        options = {"address": cluster.ray_address, "runtime_env": {"env_vars": {"PYTHONPATH": modules}}}
    try:
        # Not as a runtime environment here: Ray would leave aside the workers that it starts with itself, and have an
        # agent prepare others, which takes seconds.
        with _processes_in_their_own_group(), _own_signals(), _variable("PYTHONPATH", modules):
            ray.init(logging_level=logging.WARNING, log_to_driver=True, **options)
    except Exception as error:  # Ray raises Exception itself where its processes do not find one another in time
        raise _not_there(cluster, error) from error
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt_once)
    try:
        yield
    finally:
        ray.shutdown()


def _not_there(cluster: ClusterConfig, error: Exception) -> VimeError:
    """What `ray.init` did not manage, and what to do."""
    said = str(error).strip().partition("\n")[0] or repr(error)
    if isinstance(error, OSError) and "AF_UNIX" in said:
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR")
        return ConfigError(
            f"Ray keeps sockets in {folder} (TMPDIR), and the system allows 107 bytes for a socket's path; set "
            "RAY_TMPDIR and TMPDIR to a short path, such as /tmp"
        )
    if cluster.ray_address is not None and isinstance(error, ConnectionError | RuntimeError | AuthenticationError):
        return ConfigError(
            f"--ray-address {cluster.ray_address}: no cluster answers there ({said}); see docs/multi_node.md for `ray "
            "start`, and that this process has the cluster's token"
        )
    what = "did not start on this machine" if cluster.ray_address is None else f"did not join {cluster.ray_address}"
    return VimeError(
        f"Ray {what} ({type(error).__name__}: {said}). Its processes wait half a minute for one another: where other "
        "programs keep every core busy, start again when they do not; else Ray's logs say more, in "
        f"{os.environ.get('RAY_TMPDIR') or '/tmp'}/ray/session_latest/logs"
    )


class _PopenInItsOwnGroup(services.ConsolePopen):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group=0, **kwargs)


@contextmanager
def _processes_in_their_own_group() -> Iterator[None]:
    """Ray's servers leave the driver's process group.

    Ray 2.60 starts them inside it, and a signal to the whole group (`timeout`, a batch system, `kill -- -PGID`) would
    take Ray from under the driver while it ends the run: it then waits a minute and dies of the missing connection.
    They still end with the driver, which the kernel tells them of.
    """
    original = services.ConsolePopen
    services.ConsolePopen = _PopenInItsOwnGroup  # type: ignore[misc]
    try:
        yield
    finally:
        services.ConsolePopen = original  # type: ignore[misc]


@contextmanager
def _own_signals() -> Iterator[None]:
    """SIGTERM stays the program's own.

    Ray 2.60 takes it in `ray.init`, to end the process at once: with an exit code of its own and no word of the run's,
    whose other processes would be left to find out.
    """
    original = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = original


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """An environment variable as processes that are started inside get it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def plan_placement(cluster: ClusterConfig, platform: Platform, layout: Layout) -> Placement:
    """The node of every device of the run, on free devices where there are enough.

    Raises: ConfigError when the cluster is too small.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    here = ray.get_runtime_context().get_node_id()
    totals = {node["NodeID"]: node["Resources"] for node in alive}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    nodes = [Node(i, addresses[i], _devices(platform, resources)) for i, resources in totals.items()]
    driver = next(node for node in nodes if node.node_id == here)
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    unused = [Node(i, addresses[i], _devices(platform, free[i])) for i in totals if i in free]
    try:
        return place(layout, cluster, unused, driver)
    except ConfigError:
        # Somebody uses what is missing, or used it a moment ago: wait for it, where there is enough at all.
        return place(layout, cluster, nodes, driver)


def _devices(platform: Platform, resources: dict[str, float]) -> int:
    return int(min(resources.get(name, 0) for name in _bundle(platform)))


def _bundle(platform: Platform) -> dict[str, float]:
    """What one device takes of Ray's resources."""
    return {platform.ray_resource: 1.0, "CPU": 1.0}


@dataclass(frozen=True, slots=True)
class Reservation:
    """The devices of a run, held."""

    group: Any
    bundles: tuple[int, ...]
    """Bundle of each device."""
    numbers: tuple[str, ...]
    """Number of each device on its node, as programs are told which to use; empty strings for processes on a CPU."""

    def strategy(self, device: int) -> PlacementGroupSchedulingStrategy:
        """Where an actor on this device is to run."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[device])


def reserve(platform: Platform, placement: Placement) -> Reservation:
    """Reserve one bundle per device on its node. Blocks until all are there.

    Raises: ConfigError if somebody else keeps them.
    """
    count = placement.layout.num_devices
    if not count:
        return Reservation(None, (), ())
    group = placement_group(
        [_bundle(platform) for _ in range(count)],
        bundle_label_selector=[{"ray.io/node-id": node.node_id} for node in placement.nodes],
    )
    reservation = Reservation(group, tuple(range(count)), ("",) * count)
    try:
        if platform.ray_resource == "CPU":
            ray.get(group.ready(), timeout=_RESERVE_TIMEOUT_S)
            return reservation
        numbers = _device_numbers(platform, reservation)  # waits for the group, too
    except GetTimeoutError as error:
        raise ConfigError(
            f"{count} devices exist, but others held some of them for {_RESERVE_TIMEOUT_S:.0f} s; `ray status` lists "
            "what is in use. Wait for it to end, or join another cluster"
        ) from error
    bundles = in_device_order([node.node_id for node in placement.nodes], numbers)
    return Reservation(group, bundles, tuple(numbers[bundle] for bundle in bundles))


def in_device_order(nodes: Sequence[str], numbers: Sequence[str]) -> tuple[int, ...]:
    """Which bundle each device is, so that a node's devices are in the order of their numbers.

    Args: nodes, numbers: node and device number of each bundle, as Ray chose them.
    """
    order = list(range(len(nodes)))
    for node in set(nodes):
        places = [i for i in order if nodes[i] == node]
        ranked = sorted(places, key=lambda i: (int(numbers[i]) if numbers[i].isdigit() else 0, numbers[i]))
        for place_, bundle in zip(places, ranked, strict=True):
            order[place_] = bundle
    return tuple(order)


def _device_numbers(platform: Platform, reservation: Reservation) -> list[str]:
    @ray.remote(num_cpus=0)
    def number() -> str:
        return str(ray.get_runtime_context().get_accelerator_ids()[platform.ray_resource][0])

    claim = {"num_gpus": 1} if platform.ray_resource == "GPU" else {"resources": {platform.ray_resource: 1}}
    calls = [
        number.options(**claim, scheduling_strategy=reservation.strategy(device)).remote()
        for device in reservation.bundles
    ]
    return list(ray.get(calls, timeout=_RESERVE_TIMEOUT_S))


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the run as ctrl-C does; further signals would only interrupt the ending of its processes."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print("vime: stopping", file=sys.stderr, flush=True)
    raise KeyboardInterrupt
