"""Users' functions by dotted path: found, imported and checked when the program starts; their mistakes are named.

`vime.config.hook_table` lists them all.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, cast

from vime.errors import ConfigError, HookError, HookTimeout, VimeError

_SHOWN = 200  # characters of a wrong value in an error


class UserFunction:
    """A user's function with the flag it came by, so that whatever goes wrong in it is named.

    Args:
        flag: "--custom-rm-path".
        path: its dotted path.
        function: what is there.
    """

    def __init__(self, flag: str, path: str, function: Callable[..., Any]) -> None:
        self.flag, self.path, self.function = flag, path, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call a plain function. Raises: HookError for whatever it raised; vime's own errors as they are."""
        try:
            return self.function(*args, **kwargs)
        except (VimeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code; its sys.exit() must not end the run as if it were done
            raise HookError(f"{self} raised {raised(error, self.function)}") from error

    async def wait(self, *args: Any, timeout_s: float | None = None, timeout_flag: str = "", **kwargs: Any) -> Any:
        """Await an `async def`, for `timeout_s` seconds at most (`timeout_flag` sets them).

        Raises: HookTimeout, HookError as above.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self.function(*args, **kwargs)
        except (VimeError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # the user's code; its sys.exit() must not end the run as if it were done
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if limit.expired():
                where = _place(error.__cause__ or error, self.function)
                raise HookTimeout(
                    f"{self} did not end within {timeout_s:g} s ({timeout_flag}); it was {where}"
                ) from error
            raise HookError(f"{self} raised {raised(error, self.function)}") from error

    def takes(self, keyword: str) -> bool:
        """Whether it can be given an argument of this name."""
        parameters = inspect.signature(self.function).parameters.values()
        return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)

    def refuse(self, value: Any, expected: str) -> HookError:
        """The error for what it returned. Args: expected: "a bool or a FilterOutput"."""
        shown = value if isinstance(value, str) else repr(value)
        return HookError(
            f"{self} returned {shown[:_SHOWN]} ({type(value).__name__}), but {expected} is expected{self._defined()}"
        )

    def broken(self, problem: str) -> HookError:
        """The error for something else that it did. Args: problem: "left sample 3 pending"."""
        return HookError(f"{self} {problem}{self._defined()}")

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"

    def _defined(self) -> str:
        code = _code(self.function)
        return "" if code is None else f" (defined in {Path(code.co_filename).name}, line {code.co_firstlineno})"


def load_hook(
    path: str,
    parameters: Sequence[str],
    *,
    keywords: Sequence[str] = (),
    is_async: bool = False,
    is_plain: bool = False,
) -> Callable[..., Any]:
    """The callable at `package.module.name`, if it takes what it will be called with.

    Args:
        path: dotted path of a function, class or callable object.
        parameters: names of the positional arguments of the call, in order (their own names may differ).
        keywords: arguments passed by name.
        is_async: it will be awaited, so it must be `async def`.
        is_plain: it will not be awaited, so it must not be.
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
    if is_plain and _is_async(hook):
        raise ConfigError(f"{path!r} must be a plain function: it is not awaited; drop the `async`")
    return cast(Callable[..., Any], hook)


def check_class(path: str, cls: Any, methods: Mapping[str, Sequence[str]]) -> None:
    """Refuse what is no class, or lacks one of these methods or its parameters.

    Args: methods: name -> names of the positional arguments it is called with.
    Raises: ConfigError with all that is wrong.
    """
    if not inspect.isclass(cls):
        raise ConfigError(f"{path!r} is a {type(cls).__name__}, not a class")
    problems = []
    if missing := [name for name in methods if not callable(getattr(cls, name, None))]:
        problems.append(f"{path!r} has no method {', '.join(missing)}")
    for name, parameters in methods.items():
        if name in missing:
            continue
        method = getattr(cls, name)
        try:
            inspect.signature(method).bind("self", *parameters)
        except TypeError as error:
            call = ", ".join(parameters)
            problems.append(
                f"{path!r}.{name} has parameters {inspect.signature(method)}, but is called with ({call}): {error}"
            )
    if abstract := sorted(getattr(cls, "__abstractmethods__", ())):
        problems.append(f"{path!r} leaves out {', '.join(abstract)}")
    if problems:
        raise ConfigError(problems)


def raised(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """What a user's function raised, and where: "KeyError: 'x' (rewards.py, line 12, in score)".

    vime's own errors say all that is needed themselves.

    Args: function: the user's own; its file is preferred to that of a library it called.
    """
    frame = _frame(error, function)
    if frame is None or isinstance(error, VimeError):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    frame = _frame(error, function)
    return "waiting" if frame is None else f"in {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


def _frame(error: BaseException, function: Callable[..., Any] | None) -> traceback.FrameSummary | None:
    """The innermost frame of the user's file; of any file, if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    code = _code(function) if function is not None else None
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    chosen = own or list(frames)
    return chosen[-1] if chosen else None


def _code(function: Callable[..., Any]) -> CodeType | None:
    for candidate in (inspect.unwrap(function), getattr(function, "__call__", None)):  # noqa: B004
        code = getattr(candidate, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _is_cancelled() -> bool:
    """Whether somebody is cancelling the current task; else a CancelledError is the user's function's own."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _is_async(hook: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004
