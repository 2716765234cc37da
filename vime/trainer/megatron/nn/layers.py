"""Transformer layers for Megatron from torch's own kernels: no transformer-engine, no apex, CPU and CUDA alike.

T packed tokens, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from vime.algo.fixed_attention import fixed_attention
from vime.trainer.megatron.aligned import is_fixed
from vime.trainer.megatron.batches.packing import Packed
from vime.trainer.megatron.nn.experts import is_moe_layer, moe_spec
from vime.trainer.megatron.nn.heads import PackedSelfAttention
from vime.trainer.megatron.nn.norms import RMSNorm
from vime.trainer.megatron.nn.routed_layers import RoutedLayer
from vime.trainer.megatron.nn.rows import pad_rows, take_rows


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal grouped-query attention over packed sequences.

    Stands where Megatron's DotProductAttention would; called by `PackedSelfAttention`, which has applied RoPE.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp_group = parallel_state.get_context_parallel_group()
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, H, D]; under tensor parallel H and G are this rank's heads.
            key, value: [T, G, D].
            attention_mask: unused; the mask is causal within each sequence.
            packed_seq_params: the micro-batch's layout.
        Returns: [T, H * D].
        """
        packed = packed_seq_params
        if packed.split is not None:
            # One collective for both. Its backward sums each rank's gradients by the keys and values it has.
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.cp_group)
            key, value = both.chunk(2, -1)
        if is_fixed():
            out = _fixed(query, key, value, packed, self.softmax_scale)
        elif packed.place is None:
            out = _varlen(query, key, value, packed, self.softmax_scale)
        else:
            out = _padded(query, key, value, packed, self.softmax_scale)
        return out.flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}


def uses_varlen_kernel(device_type: str, dtype: torch.dtype, head_width: int) -> bool:
    """True where torch has an attention kernel for packed sequences: FlashAttention's, on CUDA in half precision.

    It takes head widths that are multiples of 8, up to 256.
    """
    fits = head_width % 8 == 0 and head_width <= 256
    return device_type == "cuda" and dtype in (torch.bfloat16, torch.float16) and fits


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
    """torch's kernel for packed sequences; fewer key/value heads than query heads are not repeated for it.

    With fewer queries than keys, its causal mask lets the last query see the last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    cu_q = cu_k = packed.cu_seqlens_q
    max_q = max_k = packed.max_seqlen_q
    if (split := packed.split) is not None:
        assert split.seen is not None, "a micro-batch split for padded attention"
        # Two chunks of a rank see a key at most, and the sum of two gradients does not depend on their order.
        k, v = k.index_select(0, split.seen), v.index_select(0, split.seen)
        cu_q, cu_k, max_q, max_k = split.cu_seqlens_q, split.cu_seqlens_k, split.max_seqlen_q, split.max_seqlen_k
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _names_grouped_heads() else {}
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out


@functools.cache
def _names_grouped_heads() -> bool:
    """Whether torch wants to be told of fewer key/value heads: 2.12 and later do, 2.11 has no word for it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _fixed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
    """Sequence by sequence, to the same bits as an engine with --aligned."""
    lengths = packed.cu_seqlens_q.diff().tolist()
    parts = zip(torch.split(q, lengths), torch.split(k, lengths), torch.split(v, lengths), strict=True)
    return torch.cat([fixed_attention(a, b, c, scale) for a, b, c in parts])


def _padded(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
    """One batched attention call per block of similar lengths.

    Padding lies behind each sequence, where the causal mask hides it from every real token.
    """
    assert packed.place is not None, "a micro-batch without a padded layout"
    split, q_place, q_rows = packed.split, packed.place, packed.padded_rows
    if split is not None:
        assert split.place is not None, "a micro-batch split for packed attention"
        q_place, q_rows = split.place, split.padded_rows
    q = pad_rows(q, q_place, q_rows)
    k, v = (pad_rows(x, packed.place, packed.padded_rows) for x in (k, v))
    repeat = q.shape[1] // k.shape[1]
    out = []
    for i, block in enumerate(packed.blocks):
        part = split.blocks[i] if split is not None else None
        bk, bv = (_rectangle(x, block.start, block.rows, block.length) for x in (k, v))
        bq = _rectangle(
            q, *((part.start, block.rows, part.length) if part else (block.start, block.rows, block.length))
        )
        o = F.scaled_dot_product_attention(
            bq,
            bk,
            bv,
            attn_mask=part.mask if part else None,
            is_causal=part is None,
            scale=scale,
            enable_gqa=repeat > 1,
        )
        out.append(o.transpose(1, 2).flatten(0, 1))
    return take_rows(torch.cat(out) if len(out) > 1 else out[0], q_place)


def _rectangle(x: Tensor, start: int, rows: int, length: int) -> Tensor:
    """[rows, heads, length, D] view of one block of padded rows."""
    return x[start : start + rows * length].view(rows, length, *x.shape[1:]).transpose(1, 2)


def layer_spec(config: TransformerConfig, layer: int) -> ModuleSpec:
    """One decoder layer, dense or with experts. Args: layer: its number, counted from 0 over the whole model."""
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    has_experts = is_moe_layer(config, layer)
    return ModuleSpec(
        module=RoutedLayer if has_experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=moe_spec(config) if has_experts else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """This pipeline stage's decoder layers, and the final norm for the last stage.

    Args: vp_stage: which of this rank's virtual stages; None where it has one stage.
    """
    first = get_transformer_layer_offset(config, vp_stage)
    mine = [layer_spec(config, first + i) for i in range(get_num_layers_to_build(config, vp_stage))]
    return TransformerBlockSubmodules(layer_specs=mine, layer_norm=RMSNorm)
