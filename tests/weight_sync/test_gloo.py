"""The broadcast: several engine workers, each a process of its own, and what becomes of them when one fails."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
import torch

from tests.weight_sync.ends import read, write
from vime.errors import WeightSyncError
from vime.weight_sync import gloo
from vime.wire import BucketMessage, checksum

pytestmark = pytest.mark.ranks

# Reads a message per line; prints each bucket's checksums, or why it could not be read.
READER = """
import json, os, sys, torch
from vime.errors import WeightSyncError
from vime.weight_sync.gloo import Reader
from vime.wire import BucketMessage, checksum, view_tensors
reader = Reader()
print("up", flush=True)
for line in sys.stdin:
    message = BucketMessage.from_json(json.loads(line))
    if message.index == int(sys.argv[1]):
        os._exit(9)
    try:
        data = reader.read(message, torch.device("cpu"))
        print(json.dumps([checksum(t) for _, t in view_tensors(data, message)]), flush=True)
    except WeightSyncError as error:
        print(f"WeightSyncError: {error}", flush=True)
"""

TENSORS: list[tuple[str, torch.Tensor]] = [
    ("a", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("b", torch.randn(300, 700).to(torch.bfloat16)),
    ("c.transposed", torch.arange(6.0).reshape(2, 3).t()),
    ("d.empty", torch.empty(0, 4)),
]


class Worker:
    """An engine's worker process, as far as the transport sees it."""

    def __init__(self, dies_at: int = -1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, str(dies_at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_up(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline() == "up\n"

    def tell(self, message: BucketMessage) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message.to_json()) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.startswith("[") else line


@contextmanager
def workers(*dies_at: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        started = [Worker(at) for at in dies_at]
        for worker in started:
            stack.enter_context(worker.process)
            stack.callback(worker.process.kill)
        for worker in started:
            worker.wait_up()
        yield started


def test_every_worker_gets_every_bucket_of_every_sync_and_only_the_loopback_listens() -> None:
    before = {c.laddr for c in psutil.Process().net_connections("inet")}  # of other tests
    writer = gloo.Writer("127.0.0.1", 3, timeout_s=120)
    with workers(-1, -1, -1) as engines:
        for version, size in ((1, 10), (2, 100_000)):
            for index in range(3):
                tensors = [*TENSORS, ("x", torch.full((size,), float(10 * version + index)))]
                message = write(writer, tensors, version, index)
                assert [spec.name for spec in message.tensors] == [name for name, _ in tensors]
                for engine in engines:
                    engine.tell(message)
                for engine in engines:
                    assert engine.answer() == [checksum(tensor) for _, tensor in tensors]
        pids = [psutil.Process().pid, *(engine.process.pid for engine in engines)]
        listening = [
            c.laddr.ip
            for pid in pids
            for c in psutil.Process(pid).net_connections("inet")
            if c.status == "LISTEN" and c.laddr not in before
        ]
        assert listening and set(listening) == {"127.0.0.1"}
    writer.close()


def test_a_group_is_used_again_until_a_worker_is_another_one() -> None:
    writer = gloo.Writer("127.0.0.1", 2, timeout_s=120)

    def sync(version: int, engines: list[Worker]) -> str:
        for index in range(3):
            message = write(writer, TENSORS, version, index)
            for engine in engines:
                engine.tell(message)
            assert [engine.answer() for engine in engines] == [[checksum(t) for _, t in TENSORS]] * 2
        return writer._group_name

    with workers(-1, -1, -1) as (first, second, third):
        name = sync(1, [first, second])
        assert name and sync(2, [first, second]) == name
        restarted = sync(3, [first, third])
        assert restarted != name and sync(4, [first, third]) == restarted
        assert sync(5, [second, third]) not in (name, restarted), "one that missed a sync is not of the group"
    writer.close()


def test_a_bucket_that_nobody_reads_any_more_keeps_nobody_waiting() -> None:
    """An engine refused bucket 0 while bucket 1 was laid out: nobody comes for it, and the next sync begins at once."""
    writer = gloo.Writer("127.0.0.1", 1, timeout_s=300)  # longer than a test may take
    large = [("x", torch.ones(1 << 22))]
    with workers(-1) as (engine,):
        engine.tell(write(writer, large, 1, 0))
        assert engine.answer() == [checksum(large[0][1])]
        write(writer, large, 1, 1)
        writer.call_off()
        engine.tell(write(writer, TENSORS, 2, 0))
        assert engine.answer() == [checksum(t) for _, t in TENSORS]
    writer.close()


def test_when_a_worker_dies_the_others_are_told_at_once_and_the_next_sync_works() -> None:
    large = [("x", torch.ones(1 << 22))]
    writer = gloo.Writer("127.0.0.1", 3, timeout_s=300)  # longer than a test may take
    with workers(-1, 1, -1) as engines:
        for index in range(2):
            message = write(writer, large, 1, index)
            for engine in engines:
                engine.tell(message)
            if index:
                engines[1].process.wait(60)
                writer.call_off()  # as the sync does when an engine's call fails
            answers = [engine.answer() for engine in engines]
        assert answers[1] == ""
        for answer in answers[::2]:
            assert answer.startswith("WeightSyncError: the weight sync was called off: ")
        survivors = [engines[0], engines[2]]
        again = gloo.Writer("127.0.0.1", 2, timeout_s=120)
        message = write(again, TENSORS, 2, 0)
        for engine in survivors:
            engine.tell(message)
        assert [engine.answer() for engine in survivors] == [[checksum(t) for _, t in TENSORS]] * 2
        again.close()
    writer.close()


def test_the_writer_refuses_the_next_bucket_when_the_only_worker_died() -> None:
    writer = gloo.Writer("127.0.0.1", 1, timeout_s=300)
    with workers(1) as (engine,):
        for index in range(2):
            engine.tell(write(writer, TENSORS, 1, index))
            answer = engine.answer()
        assert answer == ""
        writer.call_off()
        with pytest.raises(WeightSyncError, match="bucket 1 did not reach every engine: 0 of 1 engine workers came"):
            for index in (2, 3):  # bucket 1 must be through before the third is laid out in its place
                write(writer, TENSORS, 1, index)
    writer.close()


@pytest.mark.parametrize("told", [False, True])
def test_workers_do_not_wait_for_ever_for_one_that_never_comes(told: bool) -> None:
    writer = gloo.Writer("127.0.0.1", 2, timeout_s=60 if told else 3)
    with workers(-1) as (engine,):
        engine.tell(write(writer, TENSORS, 1, 0))
        if told:
            writer.call_off()
        answer = engine.answer()
    assert answer.startswith("WeightSyncError: the weight sync was called off: ")
    assert "of 2 engine workers came" in answer
    assert ("another engine failed" if told else "--update-weight-timeout-s") in answer
    writer.close()


def test_a_writer_that_is_gone_is_an_error() -> None:
    writer = gloo.Writer("127.0.0.1", 1, timeout_s=5)
    message = write(writer, TENSORS, 1, 0)
    writer.close()
    for sending in list(writer._sending.values()):
        sending.join()  # a reader that comes before it has looked is still served
    with pytest.raises(WeightSyncError, match=r"called off|did not come through"):
        read(gloo.Reader(), message)


@pytest.mark.parametrize("location", [{}, {"gloo": {"host": "127.0.0.1"}}, {"path": "/etc/passwd"}])
def test_a_place_that_is_not_vimes_is_refused(location: dict[str, Any]) -> None:
    message = dataclasses.replace(BucketMessage(1, 0, (), 1, {}), location=location)
    with pytest.raises(WeightSyncError, match="is not a meeting place"):
        read(gloo.Reader(), message)
