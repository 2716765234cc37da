"""Lets megatron-core 0.16.1 run on a machine without CUDA. Installed only when the platform is the CPU.

megatron-core names CUDA in the text of its functions, so torch's CUDA names are redirected to the CPU for the whole
process. Each group below says what it is for; tests/trainer/megatron/patches/test_cpu_shims.py fails for a group that
is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

CPU = torch.device("cpu")
_MARK = "__vime_cpu__"


def install() -> None:
    """Redirect torch's CUDA names to the CPU; a second call does nothing."""
    if hasattr(torch.cuda.current_device, _MARK):
        return
    _devices()
    _factories()
    _streams()
    _random_state()
    _type_names()
    _no_compiler()
    _split_sizes()


def installed() -> bool:
    """True once `install` has run in this process."""
    return hasattr(torch.cuda.current_device, _MARK)


def _devices() -> None:
    """`torch.cuda.current_device()` is passed as device= by layers, buffers, RoPE, p2p and the optimizer."""

    def current_device() -> torch.device:
        return CPU

    setattr(current_device, _MARK, True)
    _put(torch.cuda, "current_device", current_device)
    _put(torch.cuda, "device_count", lambda: 1)  # used as a modulus
    _put(torch.cuda, "set_device", _nothing())
    _put(torch.cuda, "get_device_capability", lambda *a, **k: (0, 0))


def _factories() -> None:
    """Literals device="cuda" (schedules, gradient clipping, the optimizer's scalars) and `tensor.cuda()`."""

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False  # needs an accelerator
            return function(*args, **kwargs)

        return wrapper

    # `with torch.device(...)` keeps the set of factories it redirects from its first use on. Fill it while the names
    # are torch's own: else transformers' from_pretrained leaves buffers uninitialised, rotary frequencies among them.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like"):
        _put(torch, name, on_cpu(getattr(torch, name)))
    _put(torch.Tensor, "cuda", lambda self, *a, **k: self)
    _put(torch.nn.Module, "cuda", lambda self, *a, **k: self)


def _streams() -> None:
    """DDP, p2p, the distributed optimizer and dist_checkpointing order their work by streams and events."""

    @contextlib.contextmanager
    def stream(*_: Any, **__: Any) -> Iterator[None]:
        yield

    the_stream = _Stream()
    _put(torch.cuda, "Stream", _Stream)
    _put(torch.cuda, "Event", _Event)
    _put(torch.cuda, "current_stream", lambda *a, **k: the_stream)
    _put(torch.cuda, "default_stream", lambda *a, **k: the_stream)
    _put(torch.cuda, "stream", stream)
    for name in ("set_stream", "synchronize", "empty_cache"):
        _put(torch.cuda, name, _nothing())
    _put(torch.cuda, "is_current_stream_capturing", lambda: False)
    _put(torch.cuda.nvtx, "range_push", _nothing())
    _put(torch.cuda.nvtx, "range_pop", _nothing())
    _put(torch.Tensor, "record_stream", _nothing())


def _random_state() -> None:
    """The RNG tracker and activation recomputation save and set "the CUDA generator": here, the CPU's."""
    from megatron.core.tensor_parallel import random

    for owner in (torch.cuda, torch.cuda.random):
        _put(owner, "get_rng_state", lambda *a, **k: torch.get_rng_state())
        _put(owner, "set_rng_state", lambda state, *a, **k: torch.set_rng_state(state))
    # Not torch.manual_seed, which calls back into torch.cuda.
    _put(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
    # This one goes past torch.cuda, to torch._C.
    _put(random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))
    # fork() warns when the CPU generator moved, which here it must.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _type_names() -> None:
    """The optimizer and gradient clipping compare `tensor.type()` with 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type
    spelling = {f"torch.{t}": f"torch.cuda.{t}" for t in ("FloatTensor", "HalfTensor", "BFloat16Tensor")}

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        return spelling.get(out, out) if isinstance(out, str) else out

    _put(torch.Tensor, "type", cuda_type)


def _no_compiler() -> None:
    """megatron-core's jit_fuser is torch.compile; compiling tiny CPU kernels needs a C++ compiler and minutes."""
    torch.compiler.set_stance("force_eager")


def _split_sizes() -> None:
    """The experts' dispatcher takes split sizes to the host only from a CUDA device, and gives its all-to-all tensors
    where numbers belong."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else original(tensor, as_numpy, record_stream)

    for owner in (moe_utils, token_dispatcher):
        _put(owner, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu)


class _Stream:
    """A stream on which everything has already happened."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event that has happened; its time is the host's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other._seconds - self._seconds) * 1e3


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda")


def _nothing() -> Callable[..., None]:
    """A function of its own for each name: torch's compiler refuses one that is known by two."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
