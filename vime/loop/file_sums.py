"""The files of a checkpoint by size and checksum: what is lost of it, or is not what was written."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_CHUNK = 4 << 20
_MAX_THREADS = 16  # as many read at a time; the checksum itself leaves Python's lock alone


def sums_of(folder: Path, *, checksums: bool) -> dict[str, Any]:
    """{path in the folder: [bytes, CRC-32]} of all files; without checksums {path: bytes}. Raises: OSError."""
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if not checksums:
        return sizes
    found = _checksums(list(files.values()))
    return {name: [size, crc] for (name, size), crc in zip(sizes.items(), found, strict=True)}


def damage_of(folder: Path, files: Mapping[str, Any]) -> str | None:
    """The first file that is not as it was written, in words. Args: files: as `sums_of` gave them."""
    known = {name: value if isinstance(value, list) else [value, None] for name, value in files.items()}
    for name, (size, _) in known.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (now := (folder / name).stat().st_size) != size:
            return f"{name} has {now} of {size} bytes"
    with_sums = {name: crc for name, (_, crc) in known.items() if crc is not None}
    try:
        found = _checksums([folder / name for name in with_sums])
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    for (name, crc), now in zip(with_sums.items(), found, strict=True):
        if now != crc:
            return f"{name} is not what was written: its checksum is {now:08x}, it was {crc:08x}"
    return None


def _checksums(paths: list[Path]) -> list[int]:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
