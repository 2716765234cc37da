"""The dtype of a run: the one place that names it, for trainer and engines alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")


def stored_dtype(model: Mapping[str, Any]) -> str:
    """The dtype the checkpoint is stored in.

    Args: model: the HF config; newer ones spell it `dtype`, older ones `torch_dtype`; composite ones keep it inside.
    Raises: ConfigError if it names none, or one that nothing here can serve.
    """
    inner = model.get("text_config")
    sources = [model, inner] if isinstance(inner, Mapping) else [model]
    named = [str(s[k]).removeprefix("torch.") for s in sources for k in ("dtype", "torch_dtype") if s.get(k)]
    if not named:
        raise ConfigError('the checkpoint\'s config.json names no dtype; add one, such as "dtype": "bfloat16"')
    if named[0] not in _DTYPES:
        raise ConfigError(f"the checkpoint's dtype is {named[0]}; only {', '.join(_DTYPES)} can be trained and served")
    return named[0]


def run_dtype(megatron: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """What the model is trained and served in, so that log-probs agree: --bf16 or --no-bf16, else the checkpoint's.

    Args:
        megatron: the settings given to Megatron, by field name.
        model: the HF config.
    Raises: ConfigError as `stored_dtype`.
    """
    bf16 = megatron.get("bf16")
    if bf16 is not None:
        return "bfloat16" if bf16 else "float32"
    return stored_dtype(model)


def training_dtype_problem(megatron: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """A sentence if a run that trains would do so in a dtype that it cannot; None if not.

    Args: as of `run_dtype`.
    Raises: ConfigError as `stored_dtype`.
    """
    dtype = run_dtype(megatron, model)
    if dtype != "float16":
        return None
    return (
        "the checkpoint's dtype is float16, which is not trained in (a loss scale would skip steps silently); give "
        "--bf16, which rounds its weights to bfloat16, or --no-bf16 to train in float32"
    )
