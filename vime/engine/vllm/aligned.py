"""--aligned in an engine on a CPU: attention and linear layers as the trainer computes them then, bit for bit.

vLLM 0.32's own attention computes one query at a time over blocks of its cache, torch's all queries of a sequence at
once; oneDNN and torch sum a linear layer's inputs in other blocks. In float32 both are some 1e-7 apart, and replaced by
`vime.algo.fixed_attention` and `vime.algo.fixed_linear`.
"""

from __future__ import annotations

from typing import Any

from vime.platform.cpu import ALIGNED

_MARK = "_vime_aligns"


def install() -> None:
    """Have engines that are started with the mark in additional_config use them; twice does no harm."""
    from vllm.model_executor.layers import utils
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from vime.algo.fixed_linear import fixed_linear

    attention, dispatch = CPUAttentionBackend.get_impl_cls, utils.dispatch_cpu_unquantized_gemm
    if hasattr(CPUAttentionBackend, _MARK):
        return

    def get_impl_cls() -> type[Any]:
        return _implementation() if _is_asked_for() else attention()

    def choose_product(layer: Any, remove_weight: bool) -> None:
        # Asked again at the end of a weight sync, when no configuration is current.
        is_ours = getattr(layer, "cpu_linear", None) is fixed_linear or _is_asked_for()
        if is_ours and layer.weight.ndim == 2 and not layer.weight.is_meta:
            layer.cpu_linear = fixed_linear
        else:
            dispatch(layer, remove_weight)

    setattr(CPUAttentionBackend, _MARK, attention)
    CPUAttentionBackend.get_impl_cls = staticmethod(get_impl_cls)  # type: ignore[method-assign]
    utils.dispatch_cpu_unquantized_gemm = choose_product


def _is_asked_for() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    settings = current and current.additional_config
    return isinstance(settings, dict) and bool(settings.get(ALIGNED))


def _implementation() -> type[Any]:
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vime.algo.fixed_attention import fixed_attention

    class AlignedAttention(CPUAttentionBackendImpl):
        """Keeps keys and values in the cache as they are, and attends to them request by request."""

        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            slots = slot_mapping[: len(key)]
            kept = slots >= 0
            size = kv_cache.shape[2]
            kv_cache[slots[kept] // size, :, slots[kept] % size] = torch.cat((key, value), -1)[: len(slots)][kept]

        def forward(
            self,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            output_scale: Any = None,
            output_block_scale: Any = None,
        ) -> Any:
            if attn_metadata is None:  # warming up
                return output
            if self.sliding_window != -1 or self.alibi_slopes is not None or self.sinks is not None:
                raise NotImplementedError("--aligned computes plain causal attention; this model has another")
            starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
            size, width = kv_cache.shape[2], self.head_size
            for i, length in enumerate(lengths):
                blocks = attn_metadata.block_table[i, : -(-length // size)].long()
                cached = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
                mine = slice(starts[i], starts[i + 1])
                queries = query[mine].view(-1, self.num_heads, width)
                out = fixed_attention(queries, cached[..., :width], cached[..., width:], self.scale)
                output[mine] = out.view(output[mine].shape)
            return output

    return AlignedAttention
