"""How many floating-point operations a model's forward pass takes: the numerator of TFLOP/s and MFU.

Matrix products alone, 2 operations per multiply-add; attention as causal, which halves its score matrix; nothing that
an implementation computes twice. Norms, activations, softmax and the embedding's look-up are left out (under 1 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vime.models.settings import ModelSettings


def forward_flops(model: ModelSettings, lengths: Iterable[int], num_logits: int) -> float:
    """Operations of one forward pass over sequences of these lengths; a backward pass takes twice as many.

    Args: lengths: tokens of each sequence. num_logits: positions whose logits over the vocabulary are computed.
    """
    t = model.transformer
    hidden, layers = t["hidden_size"], t["num_layers"]
    q_width = t["num_attention_heads"] * t["kv_channels"]
    kv_width = t["num_query_groups"] * t["kv_channels"]
    mlp = (3 if t["gated_linear_unit"] else 2) * hidden * t["ffn_hidden_size"]
    weights = hidden * (q_width + 2 * kv_width) + q_width * hidden + mlp
    tokens = pairs = 0
    for length in lengths:
        tokens += length
        pairs += length * (length + 1) // 2  # each token attends to itself and those before it
    per_layer = 2.0 * tokens * weights + 4.0 * pairs * q_width  # scores and their product with the values
    return float(layers * per_layer + 2.0 * num_logits * hidden * model.vocab_size)


def sample_flops(model: ModelSettings, lengths: Sequence[int], num_logits: Sequence[int]) -> list[float]:
    """[B] operations of each sample's forward pass, by `forward_flops`: what the packing plan balances.

    Args: lengths: [B] tokens. num_logits: [B] positions of each whose logits are computed.
    """
    return [forward_flops(model, (length,), n) for length, n in zip(lengths, num_logits, strict=True)]
