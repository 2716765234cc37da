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

from vime.config.hf_weights import INDEX, StoredTensor, shown
from vime.errors import ConfigError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
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


class SafetensorsFolder:
    """The tensors of an HF checkpoint. Args: tensors: those of `read_weights` that are wanted.

    Raises: ConfigError for a dtype that torch does not have.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise ConfigError(f"{tensor.file}: {shown(name)} is {tensor.dtype}, which cannot be copied; remove it")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    def outline(self, name: str) -> Outline:
        """Of one tensor."""
        tensor = self._tensors[name]
        return Outline(name, tensor.shape, _DTYPES[tensor.dtype])

    def read(self, name: str) -> Tensor:
        """One tensor. Raises: ConfigError if the file ends before it does."""
        tensor = self._tensors[name]
        data = np.fromfile(tensor.file, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.begin)
        if len(data) != tensor.num_bytes:
            raise ConfigError(f"{tensor.file} is cut short: {name} has {len(data)} of {tensor.num_bytes} bytes")
        return torch.from_numpy(data).view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


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
