"""Log-probs and entropy of logits at a sampling temperature: what the trainer's faster versions are tested against."""

from __future__ import annotations

from torch import Tensor


def token_log_probs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """The log-prob of each token under softmax(logits / temperature).

    Args:
        logits: [T, V] float; row t predicts tokens[t] (already shifted).
        tokens: [T] int.
        temperature: above 0.

    Returns: [T], natural log, in the logits' dtype (float32 at least).
    Raises: ValueError if the temperature is not above 0 or the lengths differ.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits have shape {tuple(logits.shape)} for {tuple(tokens.shape)} tokens")
    return _log_softmax(logits, temperature).gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """The entropy of softmax(logits / temperature) for each row, -sum_v p_v ln p_v.

    Args:
        logits: [T, V] float; -inf marks tokens outside the support.
        temperature: above 0.

    Returns: [T], in nats, in the logits' dtype (float32 at least).
    Raises: ValueError if the temperature is not above 0.
    """
    log_p = _log_softmax(logits, temperature)
    p = log_p.exp()
    # p = 0 contributes nothing, but 0 * -inf is NaN, in the gradient too.
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs exist only above 0")
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return (logits / temperature).log_softmax(-1)
