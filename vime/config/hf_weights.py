"""What the weight files of an HF checkpoint say of themselves: the one reader of safetensors heads and indexes.

No tensor is read. A head or an index that says anything impossible is an error that names the file, the value and what
to do: everybody who reads weights later may rest on what comes from here.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vime.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEAD_BYTES = 100_000_000  # safetensors' own limit
_MAX_DIMS = 16
_LENGTH_BYTES = 8  # of the head's length, before it
_BITS: Mapping[str, int] = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Every dtype that the format has, and how many bits a number of it takes."""
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_TO_DO = "fetch the file again, or give another checkpoint"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file, as its head describes it."""

    file: Path
    dtype: str
    """In the format's words: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which it starts."""
    num_bytes: int


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by its name, from the index, where there is one, and the files' heads.

    Raises: ConfigError if there are no safetensors, or with everything that is wrong with them.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        _refuse_other_files(folder)
        return read_head(folder / SINGLE)
    where = read_index(index)
    files = sorted(set(where.values()))
    if lost := [file for file in files if not os.path.lexists(folder / file)]:
        raise ConfigError(
            f"{folder} holds no {_listed(lost)}, of which {INDEX} speaks; fetch what is missing, or give another "
            "checkpoint"
        )
    if SINGLE not in files and os.path.lexists(folder / SINGLE):
        raise ConfigError(
            f"{folder} holds {SINGLE} and {INDEX}, which does not name it; transformers would read the first, vLLM the "
            "second: remove one of them"
        )
    problems: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            head = read_head(folder / file)
        except ConfigError as error:
            problems += error.problems
            continue
        tensors |= head
        named = {name for name, place in where.items() if place == file}
        if missing := sorted(named - head.keys()):
            problems.append(f"{folder / file} lacks {_count(missing)} that {INDEX} puts there; {_TO_DO}")
        if others := sorted(head.keys() - named):
            problems.append(f"{folder / file} holds {_count(others)} that {INDEX} does not put there; {_TO_DO}")
    if problems:
        raise ConfigError(problems)
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> name of its file beside the index. Raises: ConfigError if it is no index of safetensors."""
    where = _object(path, _bytes(path)).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ConfigError(f"{path} is damaged: its weight_map is {_value(where)}, not names of files; {_TO_DO}")
    for name, file in where.items():
        if not isinstance(file, str):
            raise ConfigError(f"{path} is damaged: the file of {shown(name)} is {_value(file)}, not a name; {_TO_DO}")
        # A path could lead out of the folder, to what is no part of the checkpoint.
        if not file.endswith(".safetensors") or not file.isprintable() or "/" in file or "\\" in file:
            raise ConfigError(
                f"{path} puts {shown(name)} into {_value(file)}; it must be a file of its own folder whose name ends "
                "in .safetensors"
            )
    return where


def read_head(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file by its name, in the order of their bytes.

    Raises: ConfigError if it is none, or its head and its contents do not fit together.
    """
    text, size = _head_of(path)
    head = _object(path, text)
    metadata = head.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ConfigError(f"{path} is damaged: its __metadata__ is {_value(metadata)}, not texts by name; {_TO_DO}")
    start = _LENGTH_BYTES + len(text)
    tensors = []
    for name, entry in head.items():
        try:
            tensors.append((name, _tensor(path, entry, start)))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {shown(name)}: {error}; {_TO_DO}") from error
    tensors.sort(key=lambda item: (item[1].begin, item[1].num_bytes))
    end = start
    for name, tensor in tensors:
        if tensor.begin != end:
            how = "overlaps the one before it" if tensor.begin < end else "leaves a hole before it"
            raise ConfigError(f"{path} is damaged: {shown(name)} begins at byte {tensor.begin} and {how}; {_TO_DO}")
        end += tensor.num_bytes
    if end != size:
        how = "is cut off" if size < end else "has bytes behind its last tensor"
        raise ConfigError(f"{path} {how}: it has {size} bytes, and its head describes {end}; {_TO_DO}")
    return dict(tensors)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object. Raises: ConfigError if it does not, or cannot be read."""
    return _object(path, _bytes(path), unique=False)


def is_buffer(name: str) -> bool:
    """Whether a tensor holds rotary embedding's angles, which older checkpoints carry and everybody computes anew."""
    return _BUFFER.fullmatch(name) is not None


def shown(name: str) -> str:
    """A tensor's name for a message; a damaged file may name it anything."""
    return name if name.isprintable() and len(name) <= 200 else _value(name)


def _tensor(path: Path, entry: Any, start: int) -> StoredTensor:
    """One entry of a head. Raises: ValueError saying what is wrong with it."""
    if not isinstance(entry, dict):
        raise ValueError(f"its entry is {_value(entry)}, not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"its dtype is {_value(dtype)}, not one of {', '.join(_BITS)}")
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 2**63 for n in shape)
    ):
        raise ValueError(f"its shape is {_value(shape)}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int for at in offsets):
        raise ValueError(f"its data_offsets are {_value(offsets)}, not where it begins and ends")
    begin, end = offsets
    bits = prod(shape) * _BITS[dtype]
    if begin < 0 or end < begin or bits != 8 * (end - begin):
        raise ValueError(
            f"its data_offsets are {_value(offsets)}, but {dtype} of shape {_value(shape)} takes {bits // 8} bytes"
        )
    return StoredTensor(path, dtype, tuple(shape), start + begin, end - begin)


def _head_of(path: Path) -> tuple[bytes, int]:
    """A file's head and the file's size. Raises: ConfigError if it can have no head."""
    _refuse_odd_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEAD_BYTES):
                raise ConfigError(
                    f"{path} is no safetensors file, or is cut off: it has {size} bytes, and would begin with a head "
                    f"of {length}; {_TO_DO}"
                )
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; {_TO_DO}") from error
    if not text.startswith(b"{"):
        raise ConfigError(f"{path} is no safetensors file: its head begins with {_value(text[:8])}; {_TO_DO}")
    return text, size


def _bytes(path: Path) -> bytes:
    _refuse_odd_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; {_TO_DO}") from error


def _refuse_odd_file(path: Path) -> None:
    """Raises: ConfigError for what is not there, and for folders, pipes and links that lead nowhere."""
    if not os.path.lexists(path):
        raise ConfigError(f"{path} is not there; {_TO_DO}")
    if not path.is_file():
        what = "a link that leads nowhere" if path.is_symlink() else "a folder" if path.is_dir() else "no plain file"
        raise ConfigError(f"{path} cannot be read: it is {what}; put the file in its place")


def _refuse_other_files(folder: Path) -> None:
    """Raises: ConfigError unless model.safetensors holds all weights of a folder without an index."""
    if not os.path.lexists(folder / SINGLE):
        raise ConfigError(f"{folder} holds neither {SINGLE} nor {INDEX}; other weight formats are not read")
    if others := sorted(path.name for path in folder.glob("*.safetensors") if path.name != SINGLE):
        raise ConfigError(
            f"{folder} holds {_listed(others)} beside {SINGLE}, and no {INDEX}; vLLM would load all of them: remove "
            "what does not belong to the model"
        )


def _object(path: Path, text: bytes, *, unique: bool = True) -> dict[str, Any]:
    """JSON text that is one object. Args: unique: whether a name that comes twice is an error."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if unique and len(made) != len(found):
            often = Counter(name for name, _ in found).most_common(1)[0][0]
            raise ValueError(f"{shown(often)} comes twice")
        return made

    try:
        # Not json's own guess of the encoding: everybody else takes UTF-8.
        value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())[:200]}; {_TO_DO}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {_value(value)}, not an object; {_TO_DO}")
    return value


def _value(value: object) -> str:
    """A value of a damaged file for a message, in one line and not endless."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # numbers of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:100]}..."


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({_listed(names)})"


def _listed(names: list[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
