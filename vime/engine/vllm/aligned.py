"""--aligned in an engine on a CPU: attention as the trainer computes it then, bit for bit.

vLLM's own kernel computes one query at a time over blocks of its cache, torch's all queries of a sequence at once; in
float32 the two are some 1e-7 apart. Both are replaced by `vime.algo.fixed_attention`.
"""

from __future__ import annotations

from typing import Any

from vime.platform.cpu import ALIGNED

_MARK = "_vime_aligns_attention"


def install() -> None:
    """Have engines that are started with the mark in additional_config use it; twice does no harm."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    original = CPUAttentionBackend.get_impl_cls
    if hasattr(CPUAttentionBackend, _MARK):
        return

    def get_impl_cls() -> type[Any]:
        from vllm.config import get_current_vllm_config

        settings = get_current_vllm_config().additional_config
        return _implementation() if isinstance(settings, dict) and settings.get(ALIGNED) else original()

    setattr(CPUAttentionBackend, _MARK, original)
    CPUAttentionBackend.get_impl_cls = staticmethod(get_impl_cls)  # type: ignore[method-assign]


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
