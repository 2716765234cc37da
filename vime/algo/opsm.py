"""Off-policy sequence masking: bad sequences that the policy has moved away from are not learnt from."""

from __future__ import annotations

from torch import Tensor

from vime.algo.sequences import Sequences


def on_policy_enough(
    log_probs: Tensor, sampling_log_probs: Tensor, advantages: Tensor, sequences: Sequences, *, delta: float
) -> tuple[Tensor, Tensor]:
    """Which tokens are kept: all but those with A < 0 in a sequence whose mean log-ratio is above delta.

    With d = mean over the sequence of (sampling_log_probs - log_probs): dropped if A < 0 and d > delta. The loss of a
    dropped token is 0; divisors stay as they are.

    Args:
        log_probs: [P] float, the policy now; no gradient is taken.
        sampling_log_probs: [P] float, under the policy that sampled the tokens.
        advantages: [P] float.
        sequences: of the P tokens.
        delta: nats per token.

    Returns: keep [P] bool, and d of each token's sequence [P].
    Source: DeepSeek-V3.2, arXiv:2512.02556, off-policy sequence masking.
    """
    moved = sequences.mean((sampling_log_probs - log_probs).detach())
    return ~((advantages < 0) & (moved > delta)), moved
