"""The HF checkpoint: where it is and what its config.json says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vime.config.hf_weights import read_json_object
from vime.errors import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_TIMEOUT_S = 10
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


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
    return read_json_object(path)


def local_checkpoint(checkpoint: str) -> Path:
    """The checkpoint as a local folder; a hub name is downloaded (into the hub's own cache) first.

    Raises: ConfigError as `read_model_config`.
    """
    return _folder(checkpoint) or _from_hub(checkpoint, only_config=False)


def tokenizer_problem(folder: Path) -> str | None:
    """A sentence if a checkpoint folder holds no tokenizer: transformers would make an empty one without a word."""
    if (path := folder / "tokenizer.json").is_file():
        try:
            read_json_object(path)
        except ConfigError as error:
            return f"--hf-checkpoint {folder}: its tokenizer is damaged: {error}"
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return f"--hf-checkpoint {folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})"


def load_tokenizer(folder: Path | str) -> Any:
    """The checkpoint's tokenizer, by transformers; code that the checkpoint brings is not run.

    Raises: ConfigError where its files are damaged, or transformers knows no such tokenizer without that code.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any kind, from several libraries
        if "trust_remote_code" not in str(error):
            raise ConfigError(
                f"--hf-checkpoint {folder}: its tokenizer cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        raise ConfigError(
            f"--hf-checkpoint {folder}: its tokenizer is code of its own (auto_map in tokenizer_config.json), which "
            "vime does not run; save it as one of transformers' own (tokenizer.json)"
        ) from error


def token_problem(folder: Path, policy_folder: Path, *, flag: str) -> str | None:
    """A sentence if a checkpoint's token ids mean other tokens than the policy's; None if not, or where files lack.

    A token that only one of the two has is no difference: the policy samples none that it has not.

    Args: flag: by which the user named the folder.
    """
    ours, theirs = (_tokens(path / "tokenizer.json") for path in (policy_folder, folder))
    by_id = {number: token for token, number in theirs.items()}
    others = [
        (token, number)
        for token, number in ours.items()
        if theirs.get(token, number) != number or by_id.get(number, token) != token
    ]
    if not others:
        return None
    token, number = min(others, key=lambda pair: pair[1])
    return (
        f"{flag} {folder} has another tokenizer: {len(others)} tokens of the policy's have other ids there, such as "
        f"{number}, which is {token!r} for the policy; samples are taken over as token ids"
    )


def _tokens(file: Path) -> dict[str, int]:
    """Ids by token, of a tokenizer.json of any kind; empty where there is none."""
    if not file.is_file():
        return {}
    tokenizer = read_json_object(file)
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # of a unigram model: pairs of token and score
        vocab = {str(entry[0]): number for number, entry in enumerate(vocab)}
    added = tokenizer.get("added_tokens")
    return {
        **(vocab if isinstance(vocab, dict) else {}),
        **{entry["content"]: entry["id"] for entry in (added if isinstance(added, list) else [])},
    }


def _folder(checkpoint: str) -> Path | None:
    """The folder meant, or None where the words can only be a hub name."""
    try:
        path = Path(checkpoint).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name that no file may have, or the home of nobody
        raise ConfigError(f"--hf-checkpoint {checkpoint} cannot be looked for: {error}") from error
    if is_folder:
        return path
    if is_there:
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
