"""What a writer writes, its reader reads: the same contract for every transport."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weight_sync.ends import CPU, read, write
from vime.errors import WeightSyncError
from vime.weight_sync import disk, shm
from vime.wire import BucketMessage, checksum, wrong_tensors

TENSORS: list[tuple[str, torch.Tensor]] = [
    ("a.weight", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("b.weight", torch.randn(5, 7).to(torch.bfloat16)),
    ("c.scalar", torch.tensor(3.5)),
    ("d.transposed", torch.arange(6.0).reshape(2, 3).t()),
    ("e.empty", torch.empty(0, 4)),
]


@pytest.fixture(params=["shm", "disk"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any, Path]]:
    writer, reader = (
        (shm.Writer(tmp_path), shm.Reader(tmp_path))
        if request.param == "shm"
        else (disk.Writer(tmp_path), disk.Reader())
    )
    yield writer, reader, tmp_path
    reader.close()
    writer.close()


def test_tensors_arrive_as_they_were(ends: tuple[Any, Any, Path]) -> None:
    writer, reader, _ = ends
    message = BucketMessage.from_json(write(writer, TENSORS, 3, 1).to_json())
    assert (message.version, message.index) == (3, 1)
    got = read(reader, message)
    assert [name for name, _ in got] == [name for name, _ in TENSORS]
    for (_, sent), (_, received), spec in zip(TENSORS, got, message.tensors, strict=True):
        assert received.dtype == sent.dtype
        torch.testing.assert_close(received, sent, rtol=0, atol=0)
        assert checksum(received) == spec.checksum


def test_two_places_are_used_in_turn_and_gone_at_the_end(ends: tuple[Any, Any, Path]) -> None:
    writer, reader, folder = ends
    before = None
    for index, size in enumerate((10, 1000, 20, 5000)):
        tensor = torch.full((size,), float(index))
        message = write(writer, [("x", tensor)], 1, index)
        if before is not None:  # the one before is still there
            ((_, got),) = read(reader, before)
            torch.testing.assert_close(got, torch.full_like(got, index - 1.0))
        ((_, got),) = read(reader, message)
        torch.testing.assert_close(got, tensor)
        assert len(list(folder.iterdir())) == min(index + 1, 2)
        before = message
    writer.close()
    assert not list(folder.iterdir())
    writer.close()


def test_a_changed_byte_changes_the_checksum(ends: tuple[Any, Any, Path]) -> None:
    writer, reader, folder = ends
    message = write(writer, TENSORS, 1, 0)
    (place,) = folder.iterdir()
    with place.open("r+b") as file:
        file.seek(message.tensors[1].offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 128]))
    wrong = [
        spec.name
        for spec, (_, tensor) in zip(message.tensors, read(reader, message), strict=True)
        if checksum(tensor) != spec.checksum
    ]
    assert wrong == wrong_tensors(reader.read(message, CPU), message)
    assert wrong == ["b.weight"]


def test_a_place_that_is_gone_is_an_error(ends: tuple[Any, Any, Path]) -> None:
    writer, reader, _ = ends
    message = write(writer, TENSORS, 1, 0)
    writer.close()
    with pytest.raises(WeightSyncError, match=r"gone|cannot read"):
        read(reader, message)


@pytest.mark.parametrize("location", [{"shm": "../etc/passwd", "path": "/etc/passwd"}, {}])
def test_a_place_that_is_not_vimes_is_refused(ends: tuple[Any, Any, Path], location: dict[str, str]) -> None:
    writer, reader, _ = ends
    message = dataclasses.replace(write(writer, TENSORS, 1, 0), location=location)
    with pytest.raises(WeightSyncError, match="is not"):
        read(reader, message)


@pytest.mark.parametrize("change", [{"offset": 1 << 30}, {"offset": -64}, {"shape": (9, 9)}, {"dtype": "Tensor"}])
def test_a_tensor_that_leaves_its_bucket_is_refused(ends: tuple[Any, Any, Path], change: dict[str, Any]) -> None:
    writer, reader, _ = ends
    message = write(writer, TENSORS, 1, 0)
    specs = (dataclasses.replace(message.tensors[0], **change), *message.tensors[1:])
    with pytest.raises(WeightSyncError, match=r"a\.weight"):
        read(reader, dataclasses.replace(message, tensors=specs))


def test_a_killed_writers_segment_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal, torch; from pathlib import Path; from vime.weight_sync import shm;"
        "w = shm.Writer(Path(sys.argv[1])); w.write([('x', torch.ones(8))], [torch.ones(8)], 1, 0);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    living = shm.Writer(tmp_path)
    write(living, TENSORS, 1, 0)
    (kept,) = tmp_path.iterdir()
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=300)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(shm.remove_stale_segments(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == [kept]
    living.close()


def test_a_killed_writers_bucket_is_removed_by_the_next_and_nothing_else_is(tmp_path: Path) -> None:
    program = (
        "import sys, os, torch; from pathlib import Path; from vime.weight_sync import disk;"
        "w = disk.Writer(Path(sys.argv[1])); w.write([('x', torch.ones(8))], [torch.ones(8)], 1, 0);"
        "os.kill(os.getpid(), 9)"
    )
    (tmp_path / "mine.txt").write_text("x")
    living = disk.Writer(tmp_path)
    message = write(living, TENSORS, 1, 0)
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=300)
    assert len(list(tmp_path.iterdir())) == 3
    disk.Writer(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", Path(message.location["path"]).name}
    living.close()


def test_a_writer_that_exits_without_close_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from vime.weight_sync import shm;"
        "w = shm.Writer(Path(sys.argv[1])); w.write([('x', torch.ones(8))], [torch.ones(8)], 1, 0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300)
    assert not list(tmp_path.iterdir())


def test_a_reader_process_that_ends_leaves_the_segment(tmp_path: Path) -> None:
    program = (
        "import sys, json; from pathlib import Path; from vime.weight_sync import shm;"
        "from vime.wire import BucketMessage;"
        "import torch; m = BucketMessage.from_json(json.loads(sys.stdin.read()));"
        "print(len(shm.Reader(Path(sys.argv[1])).read(m, torch.device('cpu'))))"
    )
    import json

    writer = shm.Writer(tmp_path)
    message = write(writer, TENSORS, 1, 0)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        input=json.dumps(message.to_json()),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == str(message.num_bytes) and not done.stderr
    assert len(list(tmp_path.iterdir())) == 1
    writer.close()


def test_no_room_in_shared_memory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    writer = shm.Writer(tmp_path)
    with pytest.raises(WeightSyncError, match=r"no room.*--update-weight-buffer-size"):
        write(writer, TENSORS, 1, 0)
    assert not list(tmp_path.iterdir())
