"""The gloo transport: each bucket is broadcast over TCP from the trainer to every engine worker, on any node.

broadcast.py has how writer and readers meet.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from vime.platform.machine import address_towards
from vime.weight_sync import broadcast
from vime.weight_sync.broadcast import Meeting, dist


class GlooLink:
    """Satisfies `broadcast.Link`."""

    name = "gloo"

    def device(self, wanted: torch.device | None) -> torch.device:
        """Host memory at both ends."""
        return torch.device("cpu")

    def join(self, store: Any, meeting: Meeting, rank: int, device: torch.device) -> Any:
        """A gloo group whose members listen on the address that reaches the store."""
        options = dist.ProcessGroupGloo._Options()
        # The address that reaches the store is the one the others can reach; gloo's own choice may be any interface's.
        address = address_towards(meeting.host, meeting.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = meeting.timeout
        return dist.ProcessGroupGloo(dist.PrefixStore(meeting.group, store), rank, meeting.num_readers + 1, options)

    def broadcast(self, group: Any, data: torch.Tensor, timeout: timedelta) -> None:
        """Within the time that the group was made with."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group.broadcast([data], options).wait()

    def leave(self, group: Any) -> None:
        """The connections close with the last reference."""


class Writer(broadcast.Writer):
    """The trainer's end; see `broadcast.Writer`."""

    def __init__(self, host: str, num_readers: int, timeout_s: float) -> None:
        super().__init__(GlooLink(), host, num_readers, timeout_s)


class Reader(broadcast.Reader):
    """The engine's end; see `broadcast.Reader`."""

    def __init__(self) -> None:
        super().__init__(GlooLink())
