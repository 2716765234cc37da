"""Users' functions by dotted path: found, imported and checked when the program starts."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from vime.errors import ConfigError, VimeError


def load_hook(
    path: str, parameters: Sequence[str], *, keywords: Sequence[str] = (), is_async: bool = False
) -> Callable[..., Any]:
    """The callable at `package.module.name`, if it takes what it will be called with.

    Args:
        path: dotted path of a function, class or callable object.
        parameters: names of the positional arguments of the call, in order (their own names may differ).
        keywords: arguments passed by name.
        is_async: it will be awaited, so it must be `async def`.
    Raises: ConfigError that says what is wrong with it.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is not a dotted path; write package.module.function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises on import is the user's to read
        raise ConfigError(
            f"{path!r}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "is its folder on PYTHONPATH?"
        ) from error
    hook: Any = getattr(module, name, None)
    if hook is None:
        raise ConfigError(f"{path!r}: {module_name} has no {name}")
    if not callable(hook):
        raise ConfigError(f"{path!r} is a {type(hook).__name__}, not a function")
    call = ", ".join([*parameters, *(f"{k}=…" for k in keywords)])
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return cast(Callable[..., Any], hook)  # a builtin without a signature: nothing to compare
    try:
        signature.bind(*parameters, **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigError(f"{path!r} has parameters {signature}, but is called with ({call}): {error}") from error
    if is_async and not _is_async(hook):
        raise ConfigError(f"{path!r} must be an `async def`: it is awaited, so that requests overlap")
    return cast(Callable[..., Any], hook)


def raised(error: BaseException) -> str:
    """What a user's function raised, and where: "KeyError: 'x' (rewards.py, line 12, in score)".

    vime's own errors say all that is needed themselves.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, VimeError):
        return f"{type(error).__name__}: {error}"
    last = frames[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def _is_async(hook: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004
