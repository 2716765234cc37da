"""Whether `train.py` would take these settings on a cluster that is not here: every check but data and weights."""

from __future__ import annotations

from collections.abc import Sequence

from vime.cli.resolve import resolve
from vime.config import Config, modes
from vime.config.critic_ranks import critic_ranks
from vime.errors import ConfigError
from vime.orchestration.placement import Node, Placement, place, plan_layout


def resolve_on(words: Sequence[str], *, nodes: int, devices_per_node: int) -> tuple[Config, Placement]:
    """The settings as a run there would have them, and where its processes would go.

    Args: words: settings, as for `train.py`.
    Raises: ConfigError with everything that a run would refuse, or if it needs more devices, or nodes, than there are.
    """
    config = resolve(words, fetch=False, here=False).config
    if nodes > 1 and config.cluster.ray_address is None:
        raise ConfigError(f"a run on {nodes} nodes joins a Ray cluster; give --ray-address (docs/multi_node.md)")
    external = bool(config.cluster.rollout_external_engine_addrs)
    layout = plan_layout(
        config.cluster,
        with_engines=modes.generates(config) and not external,
        with_trainer=modes.trains(config),
        critic=critic_ranks(config),
    )
    cluster = [Node(f"node {n}", f"10.0.0.{n + 1}", devices_per_node) for n in range(nodes)]
    return config, place(layout, config.cluster, cluster, cluster[0])
