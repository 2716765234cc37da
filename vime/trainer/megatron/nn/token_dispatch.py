"""Tokens to their experts and back by reading rows at places that are known, never by adding into them.

T tokens, K experts of each, N = T * K rows sorted by expert, E experts of the model, H hidden. megatron-core finds the
rows by a mask, for which the host waits, and adds outputs up in the model's dtype by atomic sums, in no certain order.
Here a token's outputs are gathered and added in float32, always in the same order, and the way back gathers as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from vime.trainer.megatron.nn.compiled import compiled
from vime.trainer.megatron.nn.rows import take_rows


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows belong to which token."""

    tokens: Tensor
    """[N] int64 the token of each row."""
    probs: Tensor
    """[N] int64 the place of each row's probability in [T * E]."""
    rows: Tensor
    """[T, K] int64 the rows of each token."""

    @classmethod
    def of(cls, routing_map: Tensor, num_chosen: int) -> Order:
        """Rows by expert, and those of an expert by token. Nothing waits for the device.

        Args:
            routing_map: [T, E] bool, the experts of each token.
            num_chosen: K, the number of each token's experts.
        """
        num_tokens, num_experts = routing_map.shape
        experts = routing_map.to(torch.float32).topk(num_chosen, dim=1, sorted=False).indices
        token = torch.arange(num_tokens, device=routing_map.device)
        keys, places = (experts * num_tokens + token[:, None]).flatten().sort()
        tokens = keys % num_tokens
        rows = torch.empty_like(places)
        rows[places] = torch.arange(len(places), device=rows.device)
        return cls(tokens, tokens * num_experts + keys // num_tokens, rows.view(num_tokens, num_chosen))


class ExpertLayer(MoELayer):  # type: ignore[misc]
    """Megatron's layer of experts with `GatheringDispatcher`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        usual = self.token_dispatcher
        # Its constructor takes nothing that it does not keep; what differs is how rows are moved.
        usual.__class__ = GatheringDispatcher


class GatheringDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Megatron's dispatcher with other permutations; with all experts on the rank it sends nothing anywhere."""

    _order: Order

    @property
    def _has_all_experts(self) -> bool:
        return bool(self.ep_size == 1 and self.tp_size == 1)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for the experts [N, H], and their probabilities [N]. Args: as Megatron's."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        if not self._has_all_experts:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.hidden_shape_before_permute = tokens.shape
        self._order = Order.of(routing_map, self.config.moe_router_topk)
        return copies(tokens, self._order), take_rows(probs.view(-1), self._order.probs)

    def token_dispatch(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of this rank's experts, from all ranks."""
        return (rows, probs) if self._has_all_experts else super().token_dispatch(rows, probs)

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by expert, how many each expert has, and their probabilities."""
        if not self._has_all_experts:
            out: tuple[Tensor, Tensor, Tensor] = super().dispatch_postprocess(rows, probs)
            return out
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, self.tokens_per_expert, probs

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Outputs in the order of `token_dispatch`."""
        return rows if self._has_all_experts else super().combine_preprocess(rows)

    def token_combine(self, rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs back on the tokens' rank."""
        return rows if self._has_all_experts else super().token_combine(rows, *args, **kwargs)

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """The sum of each token's outputs, in the shape of the layer's input."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        output = sums(rows, self._order).view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


def copies(x: Tensor, order: Order) -> Tensor:
    """[N, H] the row of each token [T, H], once for each of its experts."""
    out: Tensor = _Copies.apply(x, order.tokens, order.rows)  # type: ignore[no-untyped-call]
    return out


def sums(x: Tensor, order: Order) -> Tensor:
    """[T, H] the sum of each token's rows [N, H], taken in float32."""
    out: Tensor = _Sums.apply(x, order.tokens, order.rows)  # type: ignore[no-untyped-call]
    return out


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _sum_rows(grads[0].contiguous(), rows), None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum_rows(x.contiguous(), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens), None, None


@compiled(0, 1)
def _sum_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[T, H] of x [N, H] and rows [T, K]. Written out term by term, so that it is one pass without any reduction."""
    first, *others = rows.unbind(1)
    total = x[first].to(torch.float32)
    for row in others:
        total = total + x[row].to(torch.float32)
    return total.to(x.dtype)
