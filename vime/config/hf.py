"""The HF checkpoint: where it is and what its config.json says."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vime.errors import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_TIMEOUT_S = 10
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MAX_HEAD_BYTES = 100_000_000  # safetensors' own limit


def read_model_config(checkpoint: str) -> dict[str, Any]:
    """config.json of a checkpoint folder, or of a hub name (only that file is fetched).

    Raises: ConfigError when it is neither, the hub cannot be reached, or the file is no JSON object.
    """
    folder = _folder(checkpoint)
    path = folder / "config.json" if folder else _from_hub(checkpoint, only_config=True)
    if not path.is_file():
        raise ConfigError(
            f"--hf-checkpoint {checkpoint} holds no config.json; it must be an HF checkpoint folder "
            "(`vime convert` makes one of a training checkpoint)"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hf-checkpoint {checkpoint}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-checkpoint {checkpoint}: config.json holds a {type(config).__name__}, not an object")
    return config


def local_checkpoint(checkpoint: str) -> Path:
    """The checkpoint as a local folder; a hub name is downloaded (into the hub's own cache) first.

    Raises: ConfigError as `read_model_config`.
    """
    return _folder(checkpoint) or _from_hub(checkpoint, only_config=False)


def check_files(folder: Path, tensors: Iterable[str]) -> Iterator[str]:
    """What a checkpoint folder lacks, in sentences: tokenizer, weights, tensors. Reads the heads of files only.

    Args: tensors: names that its weights must hold.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make an empty tokenizer of the rest without a word
        yield f"--hf-checkpoint {folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})"
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            files = [single.name]
        there = {name for file in files for name in _tensor_names(folder / file)}
    except FileNotFoundError as error:
        yield f"--hf-checkpoint {folder} holds no {Path(error.filename).name}; other weight formats are not read"
        return
    except (OSError, ValueError, KeyError, AttributeError, struct.error) as error:
        yield f"--hf-checkpoint {folder}: its safetensors are damaged ({type(error).__name__}: {error})"
        return
    if missing := sorted(set(tensors) - there):
        yield f"--hf-checkpoint {folder} lacks {len(missing)} tensors, among them {', '.join(missing[:3])}"


def _tensor_names(path: Path) -> list[str]:
    """The names in a safetensors file's head. Raises: ValueError if the file is shorter than its head says."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEAD_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        head = json.loads(file.read(length))
    head.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in head.values()]
    if path.stat().st_size < 8 + length + max(ends, default=0):
        raise ValueError(f"{path.name} is cut off")
    return list(head)


def _folder(checkpoint: str) -> Path | None:
    """The folder meant, or None where the words can only be a hub name."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"--hf-checkpoint {checkpoint} is a file; give the folder that holds its config.json")
    if not _HUB_NAME.fullmatch(checkpoint) or checkpoint.startswith("."):
        raise ConfigError(f"--hf-checkpoint {checkpoint}: there is no such folder, and it is no hub name (owner/name)")
    return None


def _from_hub(name: str, *, only_config: bool) -> Path:
    """The file or folder in the hub client's cache, brought up to date when the hub can be reached."""
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    except ImportError as error:
        raise ConfigError(f"--hf-checkpoint {name}: there is no such folder, and the hub client is missing") from error
    reason = ""
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)  # fails at once; the downloads retry for half a minute
    except Exception as error:  # errors of httpx, requests or the client's own, by its version
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    try:
        if only_config:
            return Path(hf_hub_download(name, "config.json", local_files_only=bool(reason)))
        return Path(snapshot_download(name, allow_patterns=_CHECKPOINT_FILES, local_files_only=bool(reason)))
    except Exception as error:
        reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"--hf-checkpoint {name}: there is no such folder here, the hub did not give a model of this name, and "
            f"none was downloaded before ({reason})"
        ) from error
