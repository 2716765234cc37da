"""Corrections for tokens that the engine sampled at other probabilities than the trainer's.

P tokens under mask 1, r the importance ratio exp(trainer's log-prob - engine's), of a token by itself or of its whole
sequence. Nothing here is differentiated: weights and masks are constants of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vime.algo.sequences import Sequences

LOG_RATIO_LIMIT = 20.0
"""Nats; log-ratios, those of whole sequences too, are cut to +- this, so that every weight is finite and above 0."""


class ImportanceWeights(NamedTuple):
    """Each [P]."""

    weights: Tensor
    """Within the bounds, or 0 where mode "mask" rejects the token."""
    ratio: Tensor
    """Before the bounds."""
    below: Tensor
    """bool: the ratio is below the lower bound."""
    above: Tensor


class Rejection(NamedTuple):
    """Each [P] bool."""

    kept: Tensor
    vetoed: Tensor
    """Of a sequence that one token rejects."""


def importance_weights(
    log_ratio: Tensor, sequences: Sequences, *, level: str, mode: str, low: float, high: float
) -> ImportanceWeights:
    """What each token's policy loss is multiplied with so that it is the trainer's expectation, at bounded variance.

    Args:
        log_ratio: [P] float, the trainer's log-prob before the update less the engine's.
        sequences: of the P tokens.
        level: "token": each has its own ratio; "sequence": all of a sequence have the product of its tokens' ratios;
            "geometric": their geometric mean.
        mode: "truncate": r is cut to the bounds; "mask": 0 outside of them, r inside, bounds included.
        low, high: the bounds of r.

    Raises: ValueError on an unknown level or mode, or bounds that are not 0 <= low <= high.
    Source: truncation, TIS: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
        (fengyao.notion.site/off-policy-rl, 2025); masked tokens, IcePop: arXiv:2510.18855; masked sequences, MIS:
        richardli.xyz/rl-collapse (2025).
    """
    if not 0 <= low <= high:
        raise ValueError(f"the bounds of the ratio are {low} and {high}; 0 <= low <= high is needed")
    ratio = _of_level(log_ratio.detach(), sequences, level).exp()
    below, above = ratio < low, ratio > high
    match mode:
        case "truncate":
            weights = ratio.clamp(low, high)
        case "mask":
            weights = torch.where(below | above, torch.zeros_like(ratio), ratio)
        case _:
            raise ValueError(f"unknown mode {mode!r}; it is truncate or mask")
    return ImportanceWeights(weights, ratio, below, above)


def rejection(
    log_ratio: Tensor,
    sequences: Sequences,
    *,
    level: str,
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
) -> Rejection:
    """Which tokens are learnt from: those whose r lies within the bounds, these included.

    Args:
        log_ratio, sequences, level: as `importance_weights` takes them; with "sequence" and "geometric" whole sequences
            are kept or rejected.
        low, high: the bounds of r; None is none.
        veto: a sequence with a token whose own r is below this is rejected as a whole, whatever the level; None: none.

    Raises: ValueError on an unknown level.
    Source: as of `importance_weights`.
    """
    log_ratio = log_ratio.detach()
    ratio = _of_level(log_ratio, sequences, level).exp()
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        kept &= ratio >= low
    if high is not None:
        kept &= ratio <= high
    vetoed = torch.zeros_like(kept)
    if veto is not None:
        # A sum of marks, so that ranks with other parts of the sequence are asked as they are for a mean.
        worst = _limited(log_ratio).exp() < veto
        vetoed = sequences.mean(worst.to(log_ratio.dtype)) > 0
    return Rejection(kept & ~vetoed, vetoed)


def _of_level(log_ratio: Tensor, sequences: Sequences, level: str) -> Tensor:
    """[P] the log-ratio that a token is judged by."""
    match level:
        case "token":
            return _limited(log_ratio)
        case "sequence":
            return _limited(sequences.total(log_ratio))
        case "geometric":
            return _limited(sequences.mean(log_ratio))
    raise ValueError(f"unknown level {level!r}; it is token, sequence or geometric")


def _limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
