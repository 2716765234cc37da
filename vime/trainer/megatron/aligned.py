"""--aligned in the trainer: it computes as engines do then. A process does so, or does not, with all of its models."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from vime.algo.fixed_linear import fixed_linear

_MARK = "__vime_aligned__"
_fixed = False


def align(device_type: str, *, aligned: bool) -> None:
    """Have this process compute as aligned engines do, or as ever.

    On a CPU attention becomes `vime.algo.fixed_attention`, and the head and linear layers that ranks do not share
    `vime.algo.fixed_linear`: megatron-core 0.16.1 has no setting for what its layers multiply by. On CUDA products go
    through cuBLASLt, without splitting sums, as in vLLM's batch-invariant mode, for the rest of the process.
    """
    global _fixed
    _fixed = aligned and device_type == "cpu"
    if _fixed:
        for layer in (ColumnParallelLinear, RowParallelLinear):
            _install(layer)
    if aligned and device_type == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")
        # Neither sums in less than float32 nor in parts that are added up later.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def is_fixed() -> bool:
    """Whether sums are over a fixed number of terms: --aligned on a CPU."""
    return _fixed


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """[n, V] logits of the head, as this process multiplies. Args: x: [n, D]. weight: [V, D]."""
    return fixed_linear(x, weight) if _fixed else x @ weight.t()


def _install(layer: type[Any]) -> None:
    """Megatron's linear layers ask their `_forward_impl` for the product; ranks that share one exchange parts in it."""
    original = layer._forward_impl
    if hasattr(original, _MARK):
        return

    def forward_impl(self: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _fixed and self.tp_group.size() == 1:
            return fixed_linear(input, weight, kwargs["bias"])
        product: Tensor = original(self, input, weight, *args, **kwargs)
        return product

    setattr(forward_impl, _MARK, True)
    layer._forward_impl = forward_impl
