"""Operation by operation on a CUDA device, in bf16: are an aligned engine's results the trainer's, bit for bit?

    python -m benchmarks.agreement.operations [--out FILE]

Calls the functions of vLLM's batch-invariant mode, and the trainer's, on the same random inputs, and the first also on
some of the rows of a larger call: an engine decodes a few tokens at a time, a trainer has whole sequences. Says which
share of the results differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before vLLM is imported

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vime.trainer.megatron import aligned
from vime.trainer.megatron.nn.heads import fused_heads
from vime.trainer.megatron.nn.norms import rms_norm
from vime.trainer.megatron.nn.rope import apply_rope

Pair = tuple[str, Tensor, Tensor]
_ROWS, _EPS = 512, 1e-6
_LINEAR = [(1024, 3072), (2048, 1024), (1024, 6144), (3072, 1024), (128, 384), (1024, 151936), (896, 4864)]
_HEADS = [(16, 8, 128), (4, 2, 32), (14, 2, 64)]
"""Query heads, key-value heads, width."""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def linear() -> Iterator[Pair]:
    """Linear layers: vLLM's, torch's as ever, torch's with --aligned."""
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

    cases = [(_random(1024, inputs), _random(outputs, inputs) * inputs**-0.5) for inputs, outputs in _LINEAR]
    as_ever = [F.linear(x, weight) for x, weight in cases]
    few_as_ever = [F.linear(x[:7], weight) for x, weight in cases]
    aligned.align("cuda", aligned=True)
    for (x, weight), many, few in zip(cases, as_ever, few_as_ever, strict=True):
        shape = f"{x.shape[1]} to {weight.shape[0]}"
        engine, trainer = linear_batch_invariant(x, weight), F.linear(x, weight)
        yield f"linear, {shape}: engine's - trainer's", engine, trainer
        yield f"linear, {shape}: engine's, 7 rows and 1,024", linear_batch_invariant(x[:7], weight), engine[:7]
        yield f"linear, {shape}: trainer's, 7 rows and 1,024", F.linear(x[:7], weight), trainer[:7]
        yield f"linear, {shape}: torch as ever, 7 rows and 1,024", few, many[:7]


def norms() -> Iterator[Pair]:
    """RMSNorm of an input, and of the sum of two."""
    from vllm import _custom_ops as kernels
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    for width in (128, 1024, 4096):
        x, residual, weight = _random(_ROWS, width), _random(_ROWS, width), _random(width).abs() + 0.5
        ours, summed, plain = rms_norm(x, weight, _EPS), x + residual, torch.empty_like(x)
        kernels.rms_norm(plain, x, weight, _EPS)
        yield f"RMSNorm, {width}: engine's - trainer's", rms_norm_batch_invariant(x.clone(), weight, _EPS), ours
        yield f"RMSNorm, {width}: vLLM's other kernel - trainer's", plain, ours
        both = rms_norm_batch_invariant(x.clone(), weight, _EPS, residual=residual.clone())
        yield f"RMSNorm of a sum, {width}: engine's - trainer's", both[0], rms_norm(summed, weight, _EPS)


def activation() -> Iterator[Pair]:
    """SwiGLU: vLLM's kernel rounds between its two products."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    importlib.import_module("vllm._custom_ops")  # registers torch.ops._C
    x, width = _random(_ROWS, 6144), 3072
    engine = torch.empty(_ROWS, width, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(engine, x)
    yield "SwiGLU: engine's - trainer's", engine, bias_swiglu_impl(x[:, None], None)[:, 0]
    yield "SwiGLU: engine's - torch's, rounded twice", engine, F.silu(x[:, :width]) * x[:, width:]


def heads() -> Iterator[Pair]:
    """RoPE, and the norms of heads with it."""
    from vllm import _custom_ops as kernels
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    width, groups = 128, 8
    mixed, weight = _random(_ROWS, groups, 4, width), _random(width).abs() + 0.5
    places = torch.arange(_ROWS, device="cuda")
    angles = places[:, None] / 1e6 ** (torch.arange(0, width, 2, device="cuda") / width)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotated(query: Tensor, key: Tensor) -> Tensor:
        flat, flat_key = query.flatten(1).clone(), key.flatten(1).clone()
        kernels.rotary_embedding(places, flat, flat_key, width, torch.cat((cos, sin), -1), True)
        return flat.view(query.shape)

    query, key = mixed[:, :, :2].flatten(1, 2), mixed[:, :, 2]
    tables = cos[:, None], sin[:, None]
    yield "RoPE: engine's - trainer's", rotated(query, key), apply_rope(query, *tables)
    engine = rotated(*(rms_norm_batch_invariant(x.contiguous(), weight, _EPS) for x in (query, key)))
    yield "norms of heads and RoPE: engine's - trainer's", engine, fused_heads(mixed, weight, weight, *tables, _EPS)[0]
    apart = apply_rope(rms_norm(query, weight, _EPS), *tables)
    yield "norms of heads and RoPE: engine's - trainer's, one after the other", engine, apart


def attention() -> Iterator[Pair]:
    """300 tokens: FlashAttention 3 over a paged cache, all at once and the last one alone; torch's on the sequence."""
    from torch.nn.attention.varlen import varlen_attn
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    length, block = 300, 16
    for num_heads, groups, width in _HEADS:
        query, key, value = (_random(length, n, width) for n in (num_heads, groups, groups))
        ends = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        blocks = -(-length // block)
        cache = torch.zeros(2, blocks * block, groups, width, device="cuda", dtype=torch.bfloat16)
        cache[:, :length] = torch.stack((key, value))
        paged = cache.view(2, blocks, block, groups, width)

        def engine(queries: Tensor, paged: Tensor = paged, blocks: int = blocks, width: int = width) -> Tensor:
            given = torch.tensor([0, len(queries)], device="cuda", dtype=torch.int32)
            out: Tensor = flash_attn_varlen_func(
                q=queries,
                k=paged[0],
                v=paged[1],
                max_seqlen_q=len(queries),
                cu_seqlens_q=given,
                max_seqlen_k=length,
                seqused_k=torch.tensor([length], device="cuda", dtype=torch.int32),
                softmax_scale=width**-0.5,
                causal=True,
                block_table=torch.arange(blocks, device="cuda", dtype=torch.int32)[None],
                num_splits=1,
                fa_version=3,
            )
            return out

        scale = {"scale": width**-0.5, "window_size": (-1, 0)}
        trainer = varlen_attn(query, key, value, ends, ends, length, length, **scale)
        assert isinstance(trainer, Tensor)
        name = f"attention, {num_heads} and {groups} heads of {width}"
        yield f"{name}: engine's, all at once - trainer's", engine(query), trainer
        yield f"{name}: engine's, one token - all at once", engine(query[-1:]), engine(query)[-1:]
        yield f"{name}: engine's, one token - trainer's", engine(query[-1:]), trainer[-1:]


def log_softmax() -> Iterator[Pair]:
    """In float32."""
    from vllm.model_executor.layers import batch_invariant

    logits = torch.randn(64, 151936, device="cuda")
    yield "log-softmax: engine's - trainer's", batch_invariant.log_softmax(logits), torch.log_softmax(logits, -1)


OPERATIONS: tuple[Callable[[], Iterator[Pair]], ...] = (linear, norms, activation, heads, attention, log_softmax)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    out: Path | None = parser.parse_args().out
    torch.manual_seed(0)
    rows = []
    print("| operation | differ | most |\n|---|---|---|")
    for operation in OPERATIONS:
        for name, engine, other in operation():
            a, b = engine.float(), other.float()
            rows.append({"operation": name, "share": float((a != b).float().mean()), "max": float((a - b).abs().max())})
            print(f"| {name} | {rows[-1]['share']:.2g} | {rows[-1]['max']:.2g} |", flush=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
