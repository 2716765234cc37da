"""safetensors files, one tensor in memory at a time: safetensors' own writer wants all of a file's at once, and its
reader maps files, whose pages count as this process's memory."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vime.errors import ConfigError

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Outline:
    """A tensor without its contents."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in a file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


class SafetensorsFile:
    """Raises: ConfigError if the file is not one of safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
        header.pop("__metadata__", None)
        self._start = 8 + length
        self._header = header

    def outlines(self) -> list[Outline]:
        """Of all tensors, in the order of their bytes."""
        entries = sorted(self._header.items(), key=lambda item: item[1]["data_offsets"])
        return [Outline(name, tuple(e["shape"]), _DTYPES[e["dtype"]]) for name, e in entries]

    def read(self, name: str) -> Tensor:
        """One tensor. Raises: ConfigError if the file ends before it does."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        data = np.fromfile(self.path, dtype=np.uint8, count=end - begin, offset=self._start + begin)
        if len(data) != end - begin:
            raise ConfigError(f"{self.path} is cut short: {name} has {len(data)} of {end - begin} bytes")
        return torch.from_numpy(data).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


class SafetensorsFolder:
    """The tensors of an HF checkpoint. Args: files: tensor name -> its file."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._opened = {path: SafetensorsFile(path) for path in sorted(set(files.values()))}
        self._outlines = {o.name: o for file in self._opened.values() for o in file.outlines()}

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def outline(self, name: str) -> Outline:
        """Of one tensor."""
        return self._outlines[name]

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._opened[self._files[name]].read(name)


def write_sharded(
    outlines: Sequence[Outline], tensors: Iterator[tuple[str, Tensor]], target: Path, *, max_shard_bytes: int
) -> dict[str, int]:
    """Write tensors as model.safetensors, or as numbered files of at most so many bytes and an index.

    Args:
        outlines: of all tensors, in the order in which they come.
        target: a folder that exists.
    Returns: tensor name -> checksum.
    Raises: ValueError if a tensor is not what its outline says.
    """
    shards: list[list[Outline]] = [[]]
    for outline in outlines:
        if shards[-1] and sum(o.num_bytes for o in shards[-1]) + outline.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(outline)
    checksums: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    for k, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        checksums |= _write_file(shard, tensors, target / file)
        weight_map.update({outline.name: file for outline in shard})
    if len(shards) > 1:
        total = sum(outline.num_bytes for outline in outlines)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return checksums


def _write_file(outlines: Sequence[Outline], tensors: Iterator[tuple[str, Tensor]], path: Path) -> dict[str, int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for o in outlines:
        begin, end = end, end + o.num_bytes
        header[o.name] = {"dtype": _NAMES[o.dtype], "shape": list(o.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for o in outlines:
            name, tensor = next(tensors)
            if (name, tuple(tensor.shape), tensor.dtype) != (o.name, o.shape, o.dtype):
                raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} came where {o} was to come")
            data = _bytes(tensor)
            file.write(data)
            checksums[name] = zlib.crc32(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums
