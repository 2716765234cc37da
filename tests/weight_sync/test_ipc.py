"""Buckets read where they lie: the handles, who has which bucket when, and what is refused. The device is of files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weight_sync.ends import CPU, read, write
from tests.weight_sync.host_memory import HostMemory
from vime.errors import WeightSyncError
from vime.weight_sync import ipc
from vime.wire import BucketMessage, wrong_tensors

TENSORS: list[tuple[str, torch.Tensor]] = [
    ("a", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("b", torch.randn(30, 70).to(torch.bfloat16)),
    ("c.transposed", torch.arange(6.0).reshape(2, 3).t()),
    ("d.empty", torch.empty(0, 4)),
]

RANK = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from tests.weight_sync.host_memory import HostMemory
from vime.weight_sync.ipc import Writer
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
writer = Writer(4096, HostMemory(folder, f"device-{rank}"))
for index in range(4):
    values = torch.full((2000 * (index + 1),), float(index))  # larger each time, and at last than the buffers
    outlines = [("x", torch.empty_like(values, device="meta"))]
    contents = [values if rank == 0 else outlines[0][1]]
    print(json.dumps(writer.write(outlines, contents, 1, index).to_json()), flush=True)
    sys.stdin.readline()
writer.close()
"""


@pytest.fixture
def device(tmp_path: Path) -> HostMemory:
    return HostMemory(tmp_path, "device-0")


@pytest.fixture
def writer(device: HostMemory) -> Iterator[ipc.Writer]:
    writer = ipc.Writer(4096, device)
    yield writer
    writer.close()


@pytest.fixture
def reader(tmp_path: Path) -> ipc.Reader:
    return ipc.Reader(HostMemory(tmp_path, "device-0"))


def through_json(message: BucketMessage) -> BucketMessage:
    return BucketMessage.from_json(json.loads(json.dumps(message.to_json())))


def test_a_bucket_is_found_by_what_json_carries_and_arrives_as_it_was(writer: ipc.Writer, reader: ipc.Reader) -> None:
    message = through_json(write(writer, TENSORS, 3, 0))
    got = read(reader, message)
    assert [name for name, _ in got] == [name for name, _ in TENSORS]
    for (_, sent), (_, received) in zip(TENSORS, got, strict=True):
        torch.testing.assert_close(received, sent, rtol=0, atol=0)
    assert wrong_tensors(reader.read(message, CPU), message) == []


def test_the_bucket_before_stays_while_the_next_is_laid_out_and_two_buffers_serve_all(
    writer: ipc.Writer, reader: ipc.Reader, tmp_path: Path
) -> None:
    before = None
    for index in range(5):
        message = write(writer, [("x", torch.full((100,), float(index)))], 1, index)
        for which, value in ((before, index - 1.0), (message, float(index))):
            if which is not None:
                assert read(reader, which)[0][1].tolist() == [value] * 100
        before = message
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_read_is_the_engines_own(writer: ipc.Writer, reader: ipc.Reader) -> None:
    data = reader.read(write(writer, [("x", torch.zeros(16))], 1, 0), CPU)
    write(writer, [("x", torch.ones(16))], 1, 2)  # in the same buffer
    assert not data.any()


def test_a_bucket_is_announced_when_the_device_has_written_it(
    writer: ipc.Writer, reader: ipc.Reader, device: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's reads wait for nothing that the trainer has queued."""
    first = write(writer, [("x", torch.zeros(16))], 1, 0)
    there: list[float] = []
    monkeypatch.setattr(device, "synchronize", lambda: there.extend(reader.read(first, CPU).view(torch.float32)[:16]))
    write(writer, [("x", torch.ones(16))], 1, 2)  # in the same buffer
    assert there == [1.0] * 16


def test_a_buffer_is_opened_once_a_sync_closed_at_its_end_and_freed_only_then(tmp_path: Path) -> None:
    trainers, engines = HostMemory(tmp_path, "d"), HostMemory(tmp_path, "d")
    writer, reader = ipc.Writer(512, trainers), ipc.Reader(engines)
    for version in (1, 2):
        for index in range(4):
            size = 2000 if index == 3 else 100
            reader.read(write(writer, [("x", torch.ones(size))], version, index), CPU)
            if version == 1:
                assert not trainers.freed, "an engine may have it open"
        assert len(engines.opened) == (3 if version == 1 else 2)
        reader.end_sync()
        assert not engines.opened
    assert len(trainers.freed) == 1, "outgrown in the first sync, and so freed when the second began"
    writer.close()
    assert len(trainers.freed) == 3 and not list(tmp_path.iterdir())
    writer.close()


def test_a_changed_byte_shows_in_the_checksum(writer: ipc.Writer, reader: ipc.Reader, tmp_path: Path) -> None:
    message = write(writer, TENSORS, 1, 0)
    (place,) = tmp_path.iterdir()
    with place.open("r+b") as file:
        file.seek(message.tensors[1].offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    assert wrong_tensors(reader.read(message, CPU), message) == ["b"]


def test_what_was_there_before_does_not_show_between_tensors(writer: ipc.Writer, reader: ipc.Reader) -> None:
    """A tensor's last row of the checksum reaches to the next boundary."""
    write(writer, [("x", torch.full((500,), torch.nan))], 1, 0)
    message = write(writer, [("x", torch.ones(3)), ("y", torch.ones(5, dtype=torch.bfloat16))], 1, 2)
    assert wrong_tensors(reader.read(message, CPU), message) == []
    assert int(reader.read(message, CPU)[12:64].sum()) == 0


def test_an_engine_on_another_device_is_told(writer: ipc.Writer, tmp_path: Path) -> None:
    message = write(writer, TENSORS, 1, 0)
    with pytest.raises(
        WeightSyncError, match=r"on device device-7, where no training rank is \(they are on device-0\)"
    ):
        ipc.Reader(HostMemory(tmp_path, "device-7")).read(message, CPU)


@pytest.mark.parametrize(
    "location",
    [
        {},
        {"ipc": "x"},
        {"ipc": {"device-0": {"num_bytes": 1, "token": ""}}},
        {"ipc": {"device-0": {"handle": "zz", "num_bytes": 64, "token": "t"}}},
        {"ipc": {"device-0": {"handle": 7, "num_bytes": 64, "token": "t"}}},
    ],
)
def test_a_place_that_is_not_vimes_is_refused(reader: ipc.Reader, location: dict[str, Any]) -> None:
    message = dataclasses.replace(BucketMessage(1, 0, (), 1, {}), location=location)
    with pytest.raises(WeightSyncError, match="is not a place of vime's ipc transport"):
        reader.read(message, CPU)


def test_a_bucket_that_is_longer_than_its_buffer_is_refused(writer: ipc.Writer, reader: ipc.Reader) -> None:
    message = dataclasses.replace(write(writer, TENSORS, 1, 0), num_bytes=1 << 20)
    with pytest.raises(WeightSyncError, match="of 1048576 bytes has a place of 4"):
        reader.read(message, CPU)


def test_a_tensor_that_is_not_what_was_announced_is_named(writer: ipc.Writer) -> None:
    with pytest.raises(WeightSyncError, match=r"x was announced as float32 \[4\] and is float64 \[4\]"):
        writer.write([("x", torch.ones(4))], [torch.ones(4, dtype=torch.float64)], 1, 0)


@pytest.mark.ranks
def test_every_rank_holds_every_bucket_for_the_engine_on_its_own_device(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parents[2],
                )
            )
            for rank in range(2)
        ]
        for process in ranks:
            stack.callback(process.kill)
        engines = [ipc.Reader(HostMemory(tmp_path, f"device-{rank}")) for rank in range(2)]
        before = None
        for index in range(4):
            first, _ = (BucketMessage.from_json(json.loads(process.stdout.readline())) for process in ranks)  # type: ignore[union-attr]
            assert set(first.location["ipc"]) == {"device-0", "device-1"}
            for engine in engines:
                for number, message in ((index - 1, before), (index, first)):
                    if message is not None:
                        data = engine.read(message, CPU)
                        assert wrong_tensors(data, message) == []
                        assert data.view(torch.float32)[: 2000 * (number + 1)].unique().tolist() == [float(number)]
            before = first
            for process in ranks:
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        assert [process.wait(120) for process in ranks] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["meet"])
