"""How the weights of a run travel: the transport, the sender's address and the number of readers."""

from __future__ import annotations

from collections.abc import Sequence

from vime.config import Config
from vime.orchestration import sizes
from vime.orchestration.external import ExternalFleet
from vime.orchestration.placement import Placement
from vime.orchestration.sizes import Reach
from vime.platform.machine import address_towards, shared_memory_id
from vime.weight_sync import Route


def route_weights(config: Config, placement: Placement, transports: Sequence[str], fleet: object) -> Route:
    """The route from training rank 0 to the engines of this run, or to external ones.

    Args:
        transports: that the platform can do, best first.
        fleet: the external engines, if the run has such.
    Raises: ConfigError if the settings want a transport that does not reach.
    """
    sender = placement.layout.trainer_devices[0]
    if not isinstance(fleet, ExternalFleet):
        engines = {device for devices in placement.layout.engine_devices for device in devices}
        reach = Reach(
            same_node=placement.engines_share_the_senders_node,
            same_devices=engines <= set(placement.layout.trainer_devices),
            own_devices=sender not in engines,
        )
        transport, why = sizes.transport_name(config, transports, reach)
        readers = sum(map(len, placement.layout.engine_devices))
        return Route(transport=transport, host=placement.host(sender), num_readers=readers, why=why)
    # Rank 0's own view is known here where it runs on this process's node; elsewhere nothing is taken for granted.
    is_here = placement.nodes[sender].node_id == placement.driver.node_id
    same_memory = is_here and fleet.shared_memory_ids == {shared_memory_id()}
    # On this node they may share a device with the trainer, which only the user knows; elsewhere they cannot.
    apart = not same_memory or config.sync.update_weight_transport == "nccl"
    reach = Reach(same_node=same_memory, same_devices=False, own_devices=fleet.is_on_cuda and apart)
    transport, why = sizes.transport_name(config, transports, reach)
    if is_here:
        hosts = {address_towards(*split_address(address)) for address in fleet.addresses}
        # An engine behind the loopback can also be reached, and reach us, by the outward address.
        host = max(hosts, key=lambda one: not one.startswith("127."))
    else:
        host = placement.nodes[sender].address
    return Route(transport=transport, host=host, num_readers=fleet.num_readers, why=why)


def split_address(address: str) -> tuple[str, int]:
    """host:port as a pair."""
    host, _, port = address.rpartition(":")
    return host, int(port)
