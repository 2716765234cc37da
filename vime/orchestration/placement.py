"""Which devices train and which generate, and on which nodes: pure plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address

from vime.config import ClusterConfig
from vime.config.critic_ranks import CriticRanks
from vime.config.validate_cluster import engine_devices
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
    critic_devices: tuple[tuple[int, ...], ...] = ()
    """Those of the critic alone, a tuple per node; none where it is on the trainer's, or there is no critic."""

    @property
    def critic_ranks(self) -> tuple[int, ...]:
        """The device of each of the critic's own ranks."""
        return tuple(device for node in self.critic_devices for device in node)

    @property
    def training_devices(self) -> tuple[int, ...]:
        """All that have a rank that trains."""
        return (*self.trainer_devices, *self.critic_ranks)


def plan_layout(
    cluster: ClusterConfig, *, with_engines: bool, with_trainer: bool = True, critic: CriticRanks | None = None
) -> Layout:
    """The devices of every trainer rank and engine.

    Args:
        with_engines: False for runs that generate nothing (supervised training, replays).
        with_trainer: False for runs that only generate; the engines are then as many as with a trainer.
        critic: the critic's own ranks, where it has devices of its own; they come behind all others.
    Raises: ConfigError when the engines do not divide the devices.
    """
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    trainer = tuple(range(ranks)) if with_trainer else ()
    if not with_engines:
        return _with_critic(Layout(len(trainer), trainer, (), shared=False), critic)
    devices = engine_devices(cluster)
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
    shared = cluster.colocate and with_trainer
    return _with_critic(Layout(max(len(trainer), first + devices), trainer, engines, shared=shared), critic)


def _with_critic(layout: Layout, critic: CriticRanks | None) -> Layout:
    if critic is None or not layout.trainer_devices:
        return layout
    first, size = layout.num_devices, critic.per_node
    devices = tuple(tuple(range(first + n * size, first + (n + 1) * size)) for n in range(critic.nodes))
    return replace(layout, num_devices=first + critic.total, critic_devices=devices)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the Ray cluster."""

    node_id: str
    address: str
    """Where the other nodes reach it."""
    num_devices: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout on nodes."""

    layout: Layout
    nodes: tuple[Node, ...]
    """The node of each device."""
    driver: Node
    """Where this process and the router run."""

    @property
    def is_on_one_node(self) -> bool:
        """Whether all of the run, the driver included, is on one node."""
        return {node.node_id for node in self.nodes} <= {self.driver.node_id}

    def host(self, device: int) -> str:
        """The address that servers on this device's node listen on: the loopback's where nobody else needs them."""
        return "127.0.0.1" if self.is_on_one_node else self.nodes[device].address

    def ranks_on_node(self, device: int) -> int:
        """Ranks that train on the node of this device, the critic's included."""
        home = self.nodes[device].node_id
        return sum(self.nodes[other].node_id == home for other in self.layout.training_devices)

    def are_on_one_node(self, devices: Sequence[int]) -> bool:
        """Whether the processes there share a file system for certain."""
        return len({self.nodes[device].node_id for device in devices}) <= 1

    @property
    def engines_share_the_senders_node(self) -> bool:
        """Whether shared memory reaches from training rank 0 to every engine."""
        sender = self.nodes[self.layout.trainer_devices[0]].node_id
        return all(self.nodes[device].node_id == sender for engine in self.layout.engine_devices for device in engine)


def place(layout: Layout, cluster: ClusterConfig, nodes: Sequence[Node], driver: Node) -> Placement:
    """Give every device of the layout a node: in the order of their addresses, trainer, then critic, then engines.

    Args: nodes: of the Ray cluster, with the devices that may be used.
    Raises: ConfigError when the nodes are too few or too small.
    """
    order = sorted(nodes, key=lambda node: (ip_address(node.address), node.node_id))
    free = {node.node_id: node.num_devices for node in order}
    homes: dict[int, Node] = {}

    def take(devices: Sequence[int], candidates: Sequence[Node]) -> bool:
        for node in candidates:
            if free[node.node_id] >= len(devices):
                free[node.node_id] -= len(devices)
                homes.update(dict.fromkeys(devices, node))
                return True
        return False

    have = ", ".join(f"{node.address}: {node.num_devices}" for node in order) or "none"
    per_node = cluster.actor_num_gpus_per_node
    for first in range(0, len(layout.trainer_devices), per_node):
        used = {node.node_id for node in homes.values()}
        if not take(
            layout.trainer_devices[first : first + per_node], [node for node in order if node.node_id not in used]
        ):
            raise ConfigError(
                f"the trainer needs {cluster.actor_num_nodes} node(s) with {per_node} device(s) each "
                f"(--actor-num-nodes, --actor-num-gpus-per-node), but Ray has {have}"
            )
    critic_homes: set[str] = set()
    for group in layout.critic_devices:
        if not take(group, [node for node in order if node.node_id not in critic_homes]):
            raise ConfigError(
                f"beside the trainer's {len(layout.trainer_devices)} devices the critic needs "
                f"{len(layout.critic_devices)} node(s) with {len(group)} device(s) each (--critic-num-nodes, "
                f"--critic-num-gpus-per-node), but Ray has {have}"
            )
        critic_homes.add(homes[group[0]].node_id)
    for engine in layout.engine_devices:
        new = [device for device in engine if device not in homes]
        if new and not take(new, order):
            raise ConfigError(
                f"the run needs {layout.num_devices} devices ({len(layout.trainer_devices)} to train, "
                f"{sum(map(len, layout.engine_devices))} for engines{', shared' if layout.shared else ''}"
                f"{f', {len(layout.critic_ranks)} for the critic' if layout.critic_devices else ''}), but Ray "
                f"has {have}; use --colocate or fewer of --actor-num-gpus-per-node and --rollout-num-gpus"
            )
        if len({homes[device].node_id for device in engine}) > 1:
            raise ConfigError(
                f"an engine of {len(engine)} devices (--rollout-num-gpus-per-engine) would lie on two nodes; choose "
                "--actor-num-gpus-per-node as a multiple of it"
            )
    return Placement(layout, tuple(homes[device] for device in range(layout.num_devices)), driver)


def describe(placement: Placement, transport: str, why: str = "") -> str:
    """One line on what runs where, for whoever watches the run. Args: why: this transport and no better one."""

    def at(devices: Sequence[int]) -> str:
        return ", ".join(dict.fromkeys(placement.nodes[device].address for device in devices))

    engines = [device for engine in placement.layout.engine_devices for device in engine]
    critic = at(placement.layout.critic_ranks)
    return (
        f"trainer on {at(placement.layout.trainer_devices)}; {f'critic on {critic}; ' if critic else ''}"
        f"engines on {at(engines) or 'their own'}; router on "
        f"{placement.driver.address}; weights travel by {transport}{f' ({why})' if why else ''}"
    )
