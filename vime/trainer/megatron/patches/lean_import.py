"""Imports of megatron-core 0.16.1 without what a trainer never uses of them, which takes longer than all the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vime.trainer.megatron.patches.known_warnings import silence

_UNUSED = ("wandb",)
"""Packages that megatron-core imports where they are there, for figures of its own inference engine."""


@contextmanager
def lean_import() -> Iterator[None]:
    """Import what needs megatron-core inside, before anything else has imported it.

    Without an accelerator its functions stay as they are written: decorating them by `torch.compile` loads torch's
    compiler, though cpu_shims.py has it compile nothing.
    """
    silence()
    hidden = [name for name in _UNUSED if name not in sys.modules]
    original = torch.compile
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError
    if not torch.accelerator.is_available():
        torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = original
        for name in hidden:
            del sys.modules[name]


def _as_it_is(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`torch.compile`, called or as a decorator with settings, that leaves the function alone."""
    return model if model is not None else lambda function: function
