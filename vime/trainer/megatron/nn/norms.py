"""RMSNorm as Megatron builds it, rounding where the engine rounds; its way back is compiled on CUDA.

T packed tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime.trainer.megatron.nn.compiled import compiled


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, built as Megatron builds norms. Megatron's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # Megatron sums the gradients of marked parameters over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, rounding where the engine rounds.

        In half precision vLLM's CPU build rounds before and after the product with the weight, as HF does; its CUDA
        kernel rounds after it alone, as torch does. In float32 the two are the same.
        """
        if x.is_cuda:
            return rms_norm(x, self.weight, self.eps)
        if x.dtype.itemsize > 2:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, None, self.eps) * self.weight


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """torch's kernel, with gradients that read x and the given gradient once for x and once for the weight.

    Args:
        x: [..., D].
        weight: [D].
        eps: None: what torch takes for x's dtype.
    """
    normalised: Tensor = _Norm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)  # type: ignore[no-untyped-call]
    return normalised


def rms_scale(wide: Tensor, eps: float) -> Tensor:
    """[..., 1] what RMSNorm multiplies each row of [..., D] by."""
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, x.shape[-1])
        d_x, scale = _by_input(rows, grad, weight, ctx.eps)
        d_weight = _by_weight(rows, grad, scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x.view(x.shape), d_weight, None


@compiled(0, 1)
def _by_input(x: Tensor, grad: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[T, D], and `rms_scale` of the rows."""
    wide, by_unit = x.float(), grad.float() * weight.float()
    scale = rms_scale(wide, eps)
    unit = wide * scale
    return ((by_unit - unit * (by_unit * unit).mean(-1, keepdim=True)) * scale).to(x.dtype), scale


@compiled(0, 1, 2)
def _by_weight(x: Tensor, grad: Tensor, scale: Tensor) -> Tensor:
    """[D] float32."""
    return (grad.float() * x.float() * scale).sum(0)
