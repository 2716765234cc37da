"""The nccl transport: each bucket is broadcast from the trainer's device to the devices of every engine worker.

broadcast.py has how writer and readers meet. NCCL wants a device for each member, so this is for trainers and engines
that have devices of their own; on shared ones there is ipc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from vime.weight_sync import broadcast
from vime.weight_sync.broadcast import Meeting, dist

# When a peer dies torch ends the whole process, or a thread of its own that watches does, unless they are told to leave
# errors to whoever waits; read when a group is made.
_ERRORS_TO_THE_CALLER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_SPARE = timedelta(seconds=60)  # torch's own limit is to come after ours, which is told to whoever waits


class NcclLink:
    """Satisfies `broadcast.Link`."""

    name = "nccl"

    def device(self, wanted: torch.device | None) -> torch.device:
        """The reader's own device; this process's current one for the writer."""
        return wanted if wanted is not None else torch.device("cuda", torch.cuda.current_device())

    def join(self, store: Any, meeting: Meeting, rank: int, device: torch.device) -> Any:
        """An NCCL group, whose connections are made by its first broadcast."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = meeting.timeout + _SPARE
        prefixed = dist.PrefixStore(meeting.group, store)
        prefixed.set_timeout(meeting.timeout)
        with _environment(_ERRORS_TO_THE_CALLER):
            return dist.ProcessGroupNCCL(prefixed, rank, meeting.num_readers + 1, options)

    def broadcast(self, group: Any, data: torch.Tensor, timeout: timedelta) -> None:
        """Blocks this thread, looking for errors of the peers; a group that failed is aborted."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.device(data.device):
            group.broadcast([data], options).wait(timeout)
            torch.cuda.current_stream().synchronize()

    def leave(self, group: Any) -> None:
        """Abort: the peers may be gone, and an orderly end would wait for them."""
        group.abort()


class Writer(broadcast.Writer):
    """The trainer's end; see `broadcast.Writer`."""

    def __init__(self, host: str, num_readers: int, timeout_s: float) -> None:
        super().__init__(NcclLink(), host, num_readers, timeout_s)


class Reader(broadcast.Reader):
    """The engine's end; see `broadcast.Reader`."""

    def __init__(self) -> None:
        super().__init__(NcclLink())


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
