"""The experts of a layer as two stacked tensors, and their products in one call each.

T rows (copies of tokens, sorted by expert), E experts of this rank, H hidden, I this rank's columns of an expert's
feed-forward network, K and N the inputs and outputs of any one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from vime.trainer.megatron.nn.routed_layers import RoutedMoELayer

# Public since torch 2.10.
_GROUPED_MM: Callable[..., Tensor] | None = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
_CUT_OF_GATE_UP, _CUT_OF_DOWN = 2, 2
"""The dimensions along which expert-tensor-parallel ranks cut them."""


def moe_spec(config: TransformerConfig) -> ModuleSpec:
    """The feed-forward part of a decoder layer with experts; shared ones are built where the config has some."""
    shared = ModuleSpec(
        module=SharedExpertMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=RoutedMoELayer,
        submodules=MoESubmodules(router=TopKRouter, experts=StackedExperts, shared_experts=shared),
    )


def is_moe_layer(config: TransformerConfig, layer: int) -> bool:
    """Whether a decoder layer, counted from 0 over the whole model, has experts."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])


def keep_router_bias_in_float32(module: torch.nn.Module) -> None:
    """Undo for routers' expert biases what a model's change to half precision did: they only choose experts, and a
    rounded one chooses others."""
    for router in module.modules():
        if isinstance(router, TopKRouter):
            router._maintain_float32_expert_bias()


class StackedExperts(MegatronModule):  # type: ignore[misc]
    """This rank's experts of one layer, SwiGLU networks without biases. Built and called by `ExpertLayer`.

    Its parameters are `gate_up` [E, 2, I, H], an expert's gate and then its up projection, and `down` [E, H, I].
    Expert-parallel ranks hold equal runs of experts, expert-tensor-parallel ranks equal cuts of I. With the latter the
    output is this rank's share of a sum that MoELayer's dispatcher takes.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        if config.activation_func is not F.silu or not config.gated_linear_unit or config.add_bias_linear:
            raise ValueError("experts other than SwiGLU networks without biases are not supported")
        self._groups = pg_collection
        tp_size = pg_collection.expt_tp.size()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size // tp_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(*shape: int, cut: int, init: Callable[[Tensor], Any]) -> Parameter:
            new = Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device))
            # Each rank of the optimizer's groups has another part of it, so that gradient norms count all of them.
            set_tensor_model_parallel_attributes(tensor=new, is_parallel=True, dim=cut, stride=1)
            # Gradients are summed over the expert-data-parallel ranks. megatron-core sets this only with several
            # expert-parallel ranks, and is silently wrong with TP 2, ETP 1 and EP 1, where those ranks are others, too.
            new.allreduce = False  # type: ignore[attr-defined]
            if config.perform_initialization:
                self._initialise(new, cut, init)
            return new

        self.gate_up = parameter(2, width, hidden, cut=_CUT_OF_GATE_UP, init=config.init_method)
        self.down = parameter(hidden, width, cut=_CUT_OF_DOWN, init=config.output_layer_init_method)
        self.uses_kernel = uses_grouped_kernel(config.params_dtype, hidden, width)
        self._recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    @torch.no_grad()
    def _initialise(self, parameter: Parameter, cut: int, init: Callable[[Tensor], Any]) -> None:
        """As Megatron does: on the CPU from one stream, whatever the layout; on the device from the experts' own."""
        if not self.config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init(parameter)
            return
        tp, first = self._groups.expt_tp, self._groups.ep.rank() * len(parameter)
        shape = list(parameter.shape[1:])
        shape[cut - 1] *= tp.size()
        expert = torch.empty(shape)
        for e in range(self.config.num_moe_experts):
            init(expert)
            if first <= e < first + len(parameter):
                parameter[e - first].copy_(expert.chunk(tp.size(), cut - 1)[tp.rank()])

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The experts' outputs, each row weighted with its routing probability before the down projection.

        Args:
            x: [T, H].
            tokens_per_expert: [E] int64, rows of each expert, on the host or the device.
            probs: [T].
        Returns: [T, H], and no bias.
        """
        groups = Groups.of(tokens_per_expert, x.device, with_offsets=self.uses_kernel)
        hidden = grouped_linear(x, self.gate_up.flatten(1, 2), groups)
        if not self._recomputes_activation:
            return grouped_linear(_weighted_swiglu(hidden, probs), self.down, groups), None
        checkpoint = CheckpointWithoutOutput(fp8=None)  # its default, False, counts as some fp8
        out = grouped_linear(checkpoint.checkpoint(_weighted_swiglu, hidden, probs), self.down, groups)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def backward_dw(self) -> None:
        """Nothing is left to do after the backward pass; asked for by MoELayer's interface."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Plain cuts of [all experts, ...] tensors, which any other division can read."""
        g, axes = self._groups, len(sharded_offsets)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                tensor,
                *sharded_offsets,
                (axes, g.ep.rank(), g.ep.size()),
                (axes + cut, g.expt_tp.rank(), g.expt_tp.size()),
                replica_id=(0, 0, g.expt_dp.rank()),
                prepend_axis_num=axes,
            )
            for name, tensor, cut in (("gate_up", self.gate_up, _CUT_OF_GATE_UP), ("down", self.down, _CUT_OF_DOWN))
        }


def _weighted_swiglu(x: Tensor, probs: Tensor) -> Tensor:
    """[T, I] silu(gate) * up * prob of [T, 2 * I]; the last product in probs' dtype, which is float32."""
    out: Tensor = weighted_bias_swiglu_impl(x, None, probs.unsqueeze(-1))
    return out


class Groups:
    """Which rows belong to which expert, for the host and for the device."""

    def __init__(self, counts: Tensor, offsets: Tensor | None) -> None:
        self._counts = counts
        self._copied: torch.cuda.Event | None = None
        self.offsets = offsets
        """[E] int32 where each expert's rows end, for torch's kernel; None where it cannot be used."""

    @classmethod
    def of(cls, tokens_per_expert: Tensor, device: torch.device, *, with_offsets: bool) -> Groups:
        """From the rows of each expert, [E] on the host or the device; the host does not wait for them."""
        offsets = None
        if with_offsets:
            offsets = tokens_per_expert.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
        groups = cls(tokens_per_expert, offsets)
        if tokens_per_expert.is_cuda and torch.is_grad_enabled():  # the way back reads them, when they are long there
            groups._counts = torch.empty(tokens_per_expert.shape, dtype=tokens_per_expert.dtype, pin_memory=True)
            groups._counts.copy_(tokens_per_expert, non_blocking=True)
            groups._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            groups._copied.record()
        return groups

    @property
    def counts(self) -> list[int]:
        """Rows of each expert; waits until the device has told."""
        if self._copied is not None:
            self._copied.synchronize()
        counts: list[int] = self._counts.tolist()
        return counts

    @property
    def num_groups(self) -> int:
        """E."""
        return len(self._counts)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Each group's rows of [T, ...]."""
        return torch.split(x, self.counts)


def uses_grouped_kernel(dtype: torch.dtype, *widths: int) -> bool:
    """True where torch can multiply all groups in one call.

    Its layouts want rows of a multiple of 16 bytes, for inputs, outputs and gradients alike. Elsewhere the groups are
    multiplied one by one, which is what torch does itself but for bf16 on CUDA devices of capability 9 and 10.
    """
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return _GROUPED_MM is not None and dtype in (torch.bfloat16, torch.float32) and aligned


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Each group of rows times its own matrix.

    Args:
        x: [T, K] the groups' rows, one group behind the other.
        weight: [E, N, K].
        groups: of E groups and T rows; a group may be empty, and all of them.
    Returns: [T, N]. The gradient by the weights of an empty group is zero, never None.
    """
    out: Tensor = _GroupedLinear.apply(x, weight, groups)  # type: ignore[no-untyped-call]
    return out


class _GroupedLinear(torch.autograd.Function):
    """torch's own backward wants contiguous gradients and rows at all; and one function serves both forms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return _rows_by_matrix(x.contiguous(), weight.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = _rows_by_matrix(grad, weight, ctx.groups) if ctx.needs_input_grad[0] else None
        d_weight = _rows_by_rows(grad, x.contiguous(), ctx.groups) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None


def _rows_by_matrix(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """[T, N] of x [T, K] and matrices [E, K, N]."""
    if not len(x):
        return x.new_empty(0, matrices.shape[-1])
    if groups.offsets is not None:
        assert _GROUPED_MM is not None, "offsets without a kernel to take them"
        return _GROUPED_MM(x, matrices, offs=groups.offsets)
    out = x.new_empty(len(x), matrices.shape[-1])
    for rows, matrix, part in zip(groups.split(x), matrices, groups.split(out), strict=True):
        torch.mm(rows, matrix, out=part)
    return out


def _rows_by_rows(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """[E, N, K]: of each group, grad's rows [T, N] transposed times x's [T, K]."""
    if not len(x):
        return x.new_zeros(groups.num_groups, grad.shape[1], x.shape[1])
    if groups.offsets is not None:
        assert _GROUPED_MM is not None, "offsets without a kernel to take them"
        out = _GROUPED_MM(grad.t(), x, offs=groups.offsets)
        for e, count in enumerate(groups.counts):
            if not count:  # a sum of nothing, about which torch's kernel promises nothing
                out[e].zero_()
        return out
    out = x.new_empty(groups.num_groups, grad.shape[1], x.shape[1])
    for rows, others, part in zip(groups.split(grad), groups.split(x), out, strict=True):
        torch.mm(rows.t(), others, out=part)
    return out
