"""Broadcasts, what the gloo and nccl transports share: each bucket goes from the trainer to every engine worker.

    writer                                            each engine worker
    lay the bucket out, announce it (HTTP) ─────────> read: count oneself at the store
    all counted? say how (or why not) ──────────────> stay in the group, or join a new one
    broadcast ──────────────────────────────────────> receive, check, load
    the next bucket is laid out meanwhile, and sent when this one is through

The members meet for every bucket, so that no broadcast begins that somebody will not join, and one that failed keeps
nobody waiting. Where all of them are in one group it is kept, from sync to sync; an engine that was restarted, or an
error, leads to a new one. Store and group listen on one address each, the loopback's on one node.
Neither asks for a key: the bytes are checked against checksums that travel with the announcement, behind the run's key.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from vime.errors import WeightSyncError
from vime.weight_sync.layout import lay_out
from vime.wire import BucketMessage

dist: Any = torch.distributed  # its type stubs leave out most of what follows

_POLL_S = 0.001
_KEEP, _JOIN = b"keep", b"join"
_SPARE_S = 30.0  # how much longer a reader waits for a word than the writer waits for the readers


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of one sync meet; part of every bucket's message."""

    host: str
    port: int
    group: str
    """The writer's name for this sync."""
    held: str
    """The name of the group that the writer still is in; empty where there is none."""
    num_readers: int
    timeout_s: float

    @staticmethod
    def of(bucket: BucketMessage, transport: str) -> Meeting:
        """The meeting that a message names. Raises: WeightSyncError if it names none."""
        try:
            meeting = Meeting(**bucket.location[transport])
        except (KeyError, TypeError) as error:
            raise WeightSyncError(
                f"{dict(bucket.location)!r} is not a meeting place of vime's {transport} transport"
            ) from error
        return meeting

    @property
    def timeout(self) -> timedelta:
        """As torch.distributed takes it."""
        return timedelta(seconds=self.timeout_s)


class Link(Protocol):
    """What differs between collective libraries."""

    name: str
    """Of the transport."""

    def device(self, wanted: torch.device | None) -> torch.device:
        """Where the bytes of a broadcast lie. Args: wanted: where a reader will use them; None for the writer."""

    def join(self, store: Any, meeting: Meeting, rank: int, device: torch.device) -> Any:
        """The group of all members; `store` has keys of its own for it. Every member calls it."""

    def broadcast(self, group: Any, data: torch.Tensor, timeout: timedelta) -> None:
        """Rank 0's bytes to all; returns when they are there. Raises: RuntimeError when a peer is gone, or in time."""

    def leave(self, group: Any) -> None:
        """Give up a group, also one with a broadcast under way."""


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
        link: the library.
        host: this node's address that engines can reach; store and group listen there and nowhere else.
        num_readers: engine worker processes, over all engines.
        timeout_s: within which all of them must come, and a bucket must arrive.
    """

    def __init__(self, link: Link, host: str, num_readers: int, timeout_s: float) -> None:
        self._link, self._host, self._num_readers, self._timeout_s = link, host, num_readers, timeout_s
        self._meeting: Meeting | None = None
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""
        self._sending: dict[int, threading.Thread] = {}
        self._problem: str | None = None
        self._called_off = threading.Event()
        self._bytes: dict[int, torch.Tensor] = {}

    def write(
        self, outlines: Sequence[tuple[str, Any]], contents: Iterable[Any], version: int, index: int
    ) -> BucketMessage:
        """Lay the tensors out and broadcast them as soon as every reader has come; bucket 0 opens a new meeting.

        Waits for no reader, but for the end of the broadcast before the previous one.

        Raises: WeightSyncError if that did not reach every engine.
        """
        for number, sending in sorted(self._sending.items()):
            if index == 0 or number < index - 1:
                sending.join()  # every wait inside has a time limit
                del self._sending[number]
        if index == 0:
            self._open_meeting()
        elif self._problem is not None:
            raise WeightSyncError(self._problem)
        assert self._meeting is not None, "bucket 0 comes first"
        specs, data = lay_out(outlines, contents, lambda num_bytes: self._place(index % 2, num_bytes))
        before = self._sending.get(index - 1)
        self._sending[index] = threading.Thread(
            target=self._send,
            args=(self._meeting, data, index, before),
            name=f"{self._link.name}-broadcast",
            daemon=True,
        )
        self._sending[index].start()
        return BucketMessage(version, index, specs, data.numel(), {self._link.name: asdict(self._meeting)})

    def call_off(self) -> None:
        """An engine failed: those that wait for it to come are told that it will not."""
        self._called_off.set()

    def close(self) -> None:
        """Leave the group; a broadcast under way ends with its own time limit and is not waited for."""
        self.call_off()
        self._store = self._meeting = None
        if not any(sending.is_alive() for sending in self._sending.values()):
            self._leave()
            self._bytes.clear()

    def _place(self, turn: int, num_bytes: int) -> torch.Tensor:
        if turn not in self._bytes or self._bytes[turn].numel() < num_bytes:
            self._bytes.pop(turn, None)
            self._bytes[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=self._link.device(None))
        return self._bytes[turn][:num_bytes]

    def _open_meeting(self) -> None:
        self._store = self._problem = None
        self._called_off.clear()
        self._store, port = bound_store(self._host, timedelta(seconds=self._timeout_s))
        self._meeting = Meeting(
            self._host, port, secrets.token_hex(16), self._group_name, self._num_readers, self._timeout_s
        )

    def _send(self, meeting: Meeting, data: torch.Tensor, index: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self._problem is not None:
            return
        try:
            if data.device.type == "cuda":
                torch.cuda.set_device(data.device)  # a thread begins on device 0
            store = self._store
            assert store is not None, "closed"
            if self._wait_for_readers(store, meeting, index) == _JOIN:
                self._leave()
                self._group = self._link.join(store, meeting, 0, data.device)
                self._group_name = meeting.group
            self._link.broadcast(self._group, data, meeting.timeout)
        except Exception as error:
            # The engines report it: with this end of the connections gone, each of their reads fails too.
            self._problem = f"bucket {index} did not reach every engine: {first_line(error)}"
            self._leave()

    def _leave(self) -> None:
        group, self._group, self._group_name = self._group, None, ""
        if group is not None:
            self._link.leave(group)

    def _wait_for_readers(self, store: Any, meeting: Meeting, index: int) -> bytes:
        """Count the readers, then tell them how to go on, or why nobody does: they would wait for each other."""
        place = f"{meeting.group}/{index}"
        deadline = time.monotonic() + meeting.timeout_s
        while (come := store.add(f"{place}/come", 0)) < meeting.num_readers:
            problem = "another engine failed" if self._called_off.is_set() else ""
            if time.monotonic() > deadline:
                problem = f"that is all within {meeting.timeout_s:g} s (--update-weight-timeout-s)"
            if problem:
                problem = f"{come} of {meeting.num_readers} engine workers came; {problem}"
                store.set(f"{place}/word", problem)
                raise WeightSyncError(problem)
            time.sleep(_POLL_S)
        holding = store.add(f"{place}/holding", 0)
        word = _KEEP if self._group is not None and holding == meeting.num_readers else _JOIN
        store.set(f"{place}/word", word)
        return word


class Reader:
    """The engine's end, in each of its worker processes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._meeting: Meeting | None = None
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""

    def read(self, bucket: BucketMessage, device: torch.device) -> torch.Tensor:
        """The bucket's bytes on `device`. Waits for the writer's broadcast.

        Raises: WeightSyncError if the writer or another engine is gone, or not there in time.
        """
        meeting = Meeting.of(bucket, self._link.name)
        data = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._link.device(device))
        try:
            self._meet(meeting, bucket.index, data.device)
            self._link.broadcast(self._group, data, meeting.timeout)
        except WeightSyncError:
            self._leave()
            raise
        except Exception as error:  # torch raises RuntimeError, and DistError for the store
            self._leave()
            raise WeightSyncError(
                f"bucket {bucket.index} did not come through: {first_line(error)}; the trainer or another engine is "
                f"gone, or the network stalled for {meeting.timeout_s:g} s (--update-weight-timeout-s)"
            ) from error
        return data.to(device)

    def end_sync(self) -> None:
        """The group is kept for the next sync."""

    def close(self) -> None:
        """Leave the group."""
        self._leave()
        self._meeting = self._store = None

    def _meet(self, meeting: Meeting, index: int, device: torch.device) -> None:
        """Count oneself at the writer's store, wait for its word, stay or join. Raises: WeightSyncError, with why."""
        if meeting != self._meeting:
            self._meeting = self._store = None
            self._store = joined_store(meeting.host, meeting.port, meeting.timeout)
            self._meeting = meeting
        store, place = self._store, f"{meeting.group}/{index}"
        if self._group is not None and self._group_name in (meeting.held, meeting.group):
            store.add(f"{place}/holding", 1)  # before one is counted
        rank = store.add(f"{place}/come", 1)
        store.wait([f"{place}/word"], timedelta(seconds=meeting.timeout_s + _SPARE_S))
        word = store.get(f"{place}/word")
        if word == _KEEP:
            return
        self._leave()
        if word != _JOIN:
            raise WeightSyncError(f"the weight sync was called off: {word.decode(errors='replace')}")
        if rank > meeting.num_readers:
            raise WeightSyncError(f"{rank} engine workers came to a weight sync of {meeting.num_readers}")
        self._group = self._link.join(store, meeting, rank, device)
        self._group_name = meeting.group

    def _leave(self) -> None:
        group, self._group, self._group_name = self._group, None, ""
        if group is not None:
            self._link.leave(group)


def first_line(error: Exception) -> str:
    """Of its message."""
    return str(error).partition("\n")[0]
