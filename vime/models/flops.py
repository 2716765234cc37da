"""How many floating-point operations a model's forward pass takes: the numerator of TFLOP/s and MFU.

Matrix products alone, 2 operations per multiply-add; attention as causal, which halves its score matrix; of a mixture
of experts those that a token is sent to; nothing that an implementation computes twice. Norms, biases, activations,
softmax and the embedding's look-up are left out (under 1 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vime.models.parameters import active_parameters
from vime.models.settings import ModelSettings


def forward_flops(model: ModelSettings, lengths: Iterable[int], num_logits: int) -> float:
    """Operations of one forward pass over sequences of these lengths; a backward pass takes twice as many.

    Args: lengths: tokens of each sequence. num_logits: positions whose logits over the vocabulary are computed.
    """
    lengths = list(lengths)
    return sum(sample_flops(model, lengths, [num_logits, *[0] * (len(lengths) - 1)])) if lengths else 0.0


def sample_flops(model: ModelSettings, lengths: Sequence[int], num_logits: Sequence[int]) -> list[float]:
    """[B] operations of each sample's forward pass, by `forward_flops`: what the packing plan balances.

    Args: lengths: [B] tokens. num_logits: [B] positions of each whose logits are computed.
    """
    t = model.transformer
    per_token = 2.0 * sum(layer.matrices for layer in active_parameters(model).layers)
    # A token attends to itself and those before it; each pair takes a product with the key and one with the value.
    per_pair = 4.0 * t["num_attention_heads"] * t["kv_channels"] * t["num_layers"]
    per_logits = 2.0 * t["hidden_size"] * model.vocab_size
    return [
        per_token * length + per_pair * (length * (length + 1) // 2) + per_logits * n
        for length, n in zip(lengths, num_logits, strict=True)
    ]
