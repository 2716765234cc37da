"""The optimizer's work in a few kernels where neither transformer-engine nor apex is installed.

Without them megatron-core 0.16.1 takes each parameter by itself: a norm that is fetched from the device, a product with
the clipping factor, a copy into the model's weights; and torch's AdamW reads and writes its tensors several times over.
Here each of these is one call for all parameters, and on CUDA the update is torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

_MARK = "__vime_fused__"


def install() -> None:
    """Put the calls for all parameters in the place of Megatron's loops; a second call does nothing."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale
    original = DistributedOptimizer._copy_main_params_to_model_params
    if hasattr(original, _MARK):
        return

    def copy(self: Any) -> None:
        if self.is_stub_optimizer or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            original(self)
            return
        weights, masters = _masters_and_weights(self)
        if weights:  # a pipeline stage of dense layers has none in the experts' optimizer, and torch wants some
            torch._foreach_copy_(weights, masters)

    setattr(copy, _MARK, True)
    DistributedOptimizer._copy_main_params_to_model_params = copy


def use_fused_adam(optimizers: Sequence[Any]) -> None:
    """Let torch's Adam and AdamW update in one kernel where their parameters are on a CUDA device.

    Args: optimizers: Megatron's, single ones; others than torch's, and those on the host, are left alone.
    """
    for optimizer in optimizers:
        inner = optimizer.optimizer
        if isinstance(inner, torch.optim.Adam):
            for group in inner.param_groups:
                group["fused"] = bool(group["params"]) and all(p.is_cuda for p in group["params"])


def zero_step(group: dict[str, Any], parameter: Tensor) -> Tensor:
    """A step count where torch wants it: beside the parameter if the kernel that updates it reads it."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")


def l2_norm(chunk_size: int, noop: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """[1] the norm of all tensors together, as apex's kernel of this name gives it; nothing waits for the device."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(chunk_size: int, noop: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Each source times the factor into its destination, as apex's kernel of this name does."""
    sources, destinations = (list(tensors) for tensors in tensor_lists)
    if any(a is not b for a, b in zip(sources, destinations, strict=True)):  # Megatron gives the same ones twice
        torch._foreach_copy_(destinations, sources)
    torch._foreach_mul_(destinations, factor)


def _masters_and_weights(optimizer: DistributedOptimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The rank's parts of the model's weights, as flat views, and the float32 masters they are copied from."""
    weights, masters = [], []
    for master_groups, model_groups in (
        (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
        (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
    ):
        for master_group, model_group in zip(master_groups, model_groups, strict=True):
            for master, parameter in zip(master_group, model_group, strict=True):
                place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
                flat = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
                weights.append(flat[place.start : place.end])
                masters.append(master.detach())
    return weights, masters
