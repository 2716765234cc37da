"""Elementwise work and sums over rows as one or two kernels on CUDA, by torch.compile; as it is written elsewhere.

Of the tensors that a function says have a row for each token, the number of rows may differ from call to call: one
compilation serves all of them. Widths are compiled in, so that rows are read and written in whole vectors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def compiled(*by_row: int, rounds: bool = False) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A function compiled where its first argument is on a CUDA device and `compiler_works`.

    Args:
        by_row: the positions of arguments that are tensors with a row for each token; the first is one.
        rounds: whether what the function rounds to a narrower dtype on the way is to stay rounded, as it does without
            compilation.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        fused = torch.compile(function, options={"emulate_precision_casts": rounds})

        @functools.wraps(function)
        def call(first: Tensor, *rest: Any) -> Result:
            if not (first.is_cuda and compiler_works()):
                return function(first, *rest)
            arguments = (first, *rest)
            for place in by_row:
                if arguments[place].shape[0] > 1:  # a single row is compiled by itself
                    torch._dynamo.maybe_mark_dynamic(arguments[place], 0)
            return fused(*arguments)

        return call

    return decorate


@functools.cache
def compiler_works() -> bool:
    """Whether torch.compile can make kernels for the current CUDA device; tried once, and said if not.

    It needs Triton and a C compiler. Without them everything, Megatron's fused functions included, is computed by the
    same formulas, operator by operator.
    """
    try:
        torch.compile(_probe)(torch.ones(8, device="cuda"))
    except Exception as error:  # whatever a compiler may raise; said below
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        warnings.warn(
            f"torch.compile does not work here ({reason}); the trainer runs operator by operator, which is slower. "
            "It needs Triton and a C compiler",
            stacklevel=2,
        )
        torch.compiler.set_stance("force_eager")
        return False
    return True


def _probe(x: Tensor) -> Tensor:
    return x.sin() * 2 + 1
