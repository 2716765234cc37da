"""The gloo transport: each bucket is broadcast over TCP from the trainer's writer to every engine worker.

    writer                                            each engine worker
    lay the bucket out, announce it (HTTP) ─────────> read: count oneself at the store
    all counted? say go (or why not) ───────────────> join the group of this sync
    broadcast ──────────────────────────────────────> receive, check, load
    the next bucket waits until this one is through

The group is made anew for every sync, so that an engine that was restarted in between is no special case, and an error
leaves nothing behind. Store and group listen on one address each, the loopback's on one node. Neither asks for a key:
the bytes are checked against checksums that travel with the announcement, behind the run's key.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from vime.errors import WeightSyncError
from vime.platform.machine import address_towards
from vime.weight_sync.layout import bucket_specs, copy_into, view_tensors
from vime.wire import BucketMessage

dist: Any = torch.distributed  # its type stubs leave out most of what follows

_POLL_S = 0.005
_GO = b"go"
_SPARE_S = 30.0  # how much longer a reader waits for a word than the writer waits for the readers


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of one sync's group meet; part of every bucket's message."""

    host: str
    port: int
    group: str
    num_readers: int
    timeout_s: float

    @staticmethod
    def of(bucket: BucketMessage) -> Meeting:
        """The meeting that a message names. Raises: WeightSyncError if it names none."""
        try:
            meeting = Meeting(**bucket.location["gloo"])
        except (KeyError, TypeError) as error:
            raise WeightSyncError(
                f"{dict(bucket.location)!r} is not a meeting place of vime's gloo transport"
            ) from error
        return meeting

    @property
    def timeout(self) -> timedelta:
        """As torch.distributed takes it."""
        return timedelta(seconds=self.timeout_s)


def bound_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """A TCPStore that listens on one address; torch's own would take every interface. Returns: it and its port."""
    listener = socket.create_server((host, 0))
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False, timeout=timeout
    )
    return store, port


def joined_store(host: str, port: int, timeout: timedelta) -> Any:
    """The store that another process serves."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Writer:
    """The trainer's end, rank 0 of the group.

    Args:
        host: this node's address that engines can reach; store and group listen there and nowhere else.
        num_readers: engine worker processes, over all engines.
        timeout_s: within which all of them must come, and a bucket must arrive.
    """

    def __init__(self, host: str, num_readers: int, timeout_s: float) -> None:
        self._host, self._num_readers, self._timeout_s = host, num_readers, timeout_s
        self._meeting: Meeting | None = None
        self._store: Any = None
        self._group: Any = None
        self._sending: threading.Thread | None = None
        self._problem: Exception | None = None
        self._called_off = threading.Event()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: Sequence[tuple[str, Any]], version: int, index: int) -> BucketMessage:
        """Lay the tensors out and broadcast them as soon as every reader has come; bucket 0 opens a new meeting.

        Raises: WeightSyncError if the bucket before this one did not reach every engine.
        """
        if self._sending is not None:
            self._sending.join()  # every wait inside has a time limit
        if index == 0:
            self._open_meeting()
        elif self._problem is not None:
            raise WeightSyncError(f"bucket {index - 1} did not reach every engine: {_first_line(self._problem)}")
        assert self._meeting is not None, "bucket 0 comes first"
        specs, num_bytes = bucket_specs(tensors)
        if self._bytes.numel() < num_bytes:
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        copy_into(self._bytes, tensors, specs)
        self._sending = threading.Thread(
            target=self._send, args=(self._meeting, self._bytes[:num_bytes]), name="gloo-broadcast", daemon=True
        )
        self._sending.start()
        return BucketMessage(version, index, specs, num_bytes, {"gloo": asdict(self._meeting)})

    def call_off(self) -> None:
        """An engine failed: those that wait for it to come are told that it will not."""
        self._called_off.set()

    def close(self) -> None:
        """Leave the group; a broadcast under way ends with its own time limit and is not waited for."""
        self.call_off()
        self._group = self._store = self._meeting = None

    def _open_meeting(self) -> None:
        self._group = self._store = self._problem = None
        self._called_off.clear()
        self._store, port = bound_store(self._host, timedelta(seconds=self._timeout_s))
        self._meeting = Meeting(self._host, port, secrets.token_hex(16), self._num_readers, self._timeout_s)

    def _send(self, meeting: Meeting, data: torch.Tensor) -> None:
        try:
            if self._group is None:
                assert self._store is not None
                self._wait_for_readers(self._store, meeting)
                self._group = _join(self._store, meeting, rank=0)
            _broadcast(self._group, data)
        except Exception as error:
            # The engines report it: with this end of the connections gone, each of their reads fails too.
            self._problem = error
            self._group = None

    def _wait_for_readers(self, store: Any, meeting: Meeting) -> None:
        """Count the readers, then tell them to go, or why nobody goes: they would wait for each other otherwise."""
        deadline = time.monotonic() + meeting.timeout_s
        while (come := store.add(f"{meeting.group}/come", 0)) < meeting.num_readers:
            problem = "another engine failed" if self._called_off.is_set() else ""
            if time.monotonic() > deadline:
                problem = f"that is all within {meeting.timeout_s:g} s (--update-weight-timeout-s)"
            if problem:
                problem = f"{come} of {meeting.num_readers} engine workers came; {problem}"
                store.set(f"{meeting.group}/word", problem)
                raise WeightSyncError(problem)
            time.sleep(_POLL_S)
        store.set(f"{meeting.group}/word", _GO)


class Reader:
    """The engine's end, in each of its worker processes."""

    def __init__(self) -> None:
        self._meeting: Meeting | None = None
        self._group: Any = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, bucket: BucketMessage) -> list[tuple[str, Any]]:
        """[(HF name, tensor view)], valid until the next call. Waits for the writer's broadcast.

        Raises: WeightSyncError if the writer or another engine is gone, or not there in time.
        """
        meeting = Meeting.of(bucket)
        if self._bytes.numel() < bucket.num_bytes:
            self._bytes = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        data = self._bytes[: bucket.num_bytes]
        try:
            if meeting != self._meeting or self._group is None:
                self._group, self._meeting = None, meeting
                self._group = _meet(meeting)
            _broadcast(self._group, data)
        except WeightSyncError:
            raise
        except Exception as error:  # torch raises RuntimeError, and DistError for the store
            self.close()
            raise WeightSyncError(
                f"bucket {bucket.index} did not come through: {_first_line(error)}; the trainer or another engine is "
                f"gone, or the network stalled for {meeting.timeout_s:g} s (--update-weight-timeout-s)"
            ) from error
        return view_tensors(data, bucket)

    def close(self) -> None:
        """Leave the group."""
        self._group = self._meeting = None


def _meet(meeting: Meeting) -> Any:
    """Count oneself at the writer's store, wait for its word, join. Raises: WeightSyncError with its reason."""
    store = joined_store(meeting.host, meeting.port, meeting.timeout)
    rank = store.add(f"{meeting.group}/come", 1)
    store.wait([f"{meeting.group}/word"], timedelta(seconds=meeting.timeout_s + _SPARE_S))
    word = store.get(f"{meeting.group}/word")
    if word != _GO:
        raise WeightSyncError(f"the weight sync was called off: {word.decode(errors='replace')}")
    if rank > meeting.num_readers:
        raise WeightSyncError(f"{rank} engine workers came to a weight sync of {meeting.num_readers}")
    return _join(store, meeting, rank)


def _join(store: Any, meeting: Meeting, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # The address that reaches the store is the one the others can reach; gloo's own choice may be any interface's.
    address = address_towards(meeting.host, meeting.port)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = meeting.timeout
    return dist.ProcessGroupGloo(dist.PrefixStore(meeting.group, store), rank, meeting.num_readers + 1, options)


def _broadcast(group: Any, data: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([data], options).wait()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
