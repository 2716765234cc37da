"""Which HF names a weight sync must bring: the ledger of one sync, and the engine's own view of "complete".

The trainer announces the names it will send. That alone would let it define completeness, so the names are checked
against the checkpoint that the engine was started from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vime.config.hf_weights import is_buffer, read_weights
from vime.wire import duplicate_names

TRANSFER_BACKEND = "vime"  # the name vLLM knows our transfer engine by (worker_ext.py)

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def checkpoint_names(model: str, hf_config: Any) -> frozenset[str] | None:
    """The tensor names of an HF checkpoint that belong to the policy; None if it holds no safetensors.

    Left out: the output head of a model with tied embeddings (some checkpoints store the copy), the rotary
    frequencies older checkpoints carry, and layers past num_hidden_layers (multi-token prediction, not trained: an
    engine without a drafter does not load them, and one with a drafter keeps those of its checkpoint).

    Args:
        model: a folder, or a hub name that is in the local cache.
        hf_config: the model's transformers config.
    Raises: ConfigError if its safetensors are damaged, or an index is and names others.
    """
    folder = checkpoint_folder(model)
    if not any(folder.glob("*.safetensors*")):
        return None
    layers = hf_config.num_hidden_layers

    def is_extra(name: str) -> bool:
        layer = _LAYER.search(name)
        return (
            (name == "lm_head.weight" and bool(getattr(hf_config, "tie_word_embeddings", False)))
            or is_buffer(name)
            or (layer is not None and int(layer.group(1)) >= layers)
        )

    return frozenset(name for name in read_weights(folder) if not is_extra(name))


def checkpoint_folder(model: str) -> Path:
    """The folder of a checkpoint that is a folder already, or a hub name in the local cache."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


class WeightLedger:
    """Keeps the books of one sync: announced names, required names, received names.

    Args:
        announced: the names the trainer says it will send.
        required: the names of the engine's checkpoint, None if it has none to compare with.
    """

    def __init__(self, announced: Sequence[str], required: frozenset[str] | None) -> None:
        self._announced, self._required = list(announced), required
        self._received: set[str] = set()

    def announcement_problem(self) -> str | None:
        """What is wrong with the announced names, or None."""
        if twice := duplicate_names(self._announced):
            return f"announced twice: {listed(twice)}"
        if not self._announced:
            return "no names were announced"
        if self._required is None:
            return None
        return _difference(set(self._announced), self._required, "the checkpoint the engine was started from")

    def receive(self, names: Sequence[str]) -> str | None:
        """Note one bucket's names, before they are loaded. Returns: which are doubled or unexpected, or None."""
        twice = duplicate_names([*self._received, *names])
        unexpected = sorted(set(names) - set(self._announced))
        self._received |= set(names)
        if twice:
            return f"received twice: {listed(twice)}"
        return f"not among the announced names: {listed(unexpected)}" if unexpected else None

    def completion_problem(self) -> str | None:
        """What is missing at the end, or None."""
        return _difference(self._received, frozenset(self._announced), "the announced names")


def _difference(have: set[str], want: frozenset[str], what: str) -> str | None:
    parts = []
    if missing := sorted(want - have):
        parts.append(f"missing: {listed(missing)}")
    if unexpected := sorted(have - want):
        parts.append(f"unexpected: {listed(unexpected)}")
    return f"names differ from {what}; {'; '.join(parts)}" if parts else None


def listed(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, for an error message."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
