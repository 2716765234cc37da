"""Training checkpoints are read without running what is in them.

torch keeps a checkpoint's index, and what is no tensor, as pickles, and unpickles both freely: somebody else's file
could call anything. Here the index may name torch's own records alone, and the objects what `torch.load` takes with
weights_only. `check` looks at all of it before torch or Megatron reads it.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_RECORDS = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "BytesIOWriteData"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint. Raises: UnpicklingError or whatever a damaged pickle leads to; OSError."""
    with (folder / ".metadata").open("rb") as file:
        metadata = _Records(file).load()
    if not isinstance(metadata, Metadata):
        raise TypeError(f".metadata holds a {type(metadata).__name__}")
    return metadata


def check(folder: Path) -> None:
    """Raises: UnpicklingError if the index or an object in the checkpoint names code; others if it is damaged."""
    metadata = read_metadata(folder)
    objects = {key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)}
    for index, place in (metadata.storage_data or {}).items():
        if index.fqn in objects:
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)


class _Records(pickle.Unpickler):
    """Takes torch's records of a checkpoint and torch's dtypes, nothing that could be called for an effect."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name. Raises: UnpicklingError if a checkpoint's index has no use for it."""
        if (module, name) in _RECORDS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs and might be made to run")
