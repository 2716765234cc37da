"""Generalised advantage estimation over the tokens that the policy sampled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MASKED_KINDS = ("skip", "zero")
"""What a token under mask 0 is to the estimator; see `gae`."""


class Gae(NamedTuple):
    """Both [T] float64, 0 under mask 0."""

    advantages: FloatArray
    returns: FloatArray
    """What the value function is trained towards: advantage + value."""


def gae(
    token_rewards: npt.NDArray[Any],
    values: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    cu_seqlens: npt.NDArray[Any],
    bootstrap: npt.NDArray[Any],
    *,
    gamma: float,
    lam: float,
    masked: str = "skip",
) -> Gae:
    """Advantages and returns of each token, sample by sample.

    With r_t the reward of token t, V_t the value before it and t' the step after t:
    delta_t = r_t + gamma V_t' - V_t and A_t = delta_t + gamma lam A_t'.
    Behind the last step V is the sample's `bootstrap` and A is 0.

    Args:
        token_rewards: [T] float.
        values: [T] float, the value of the state before each token.
        mask: [T], nonzero where the policy sampled the token. Elsewhere rewards and values may be anything, NaN
            included.
        cu_seqlens: [B + 1] int; sample i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).
        bootstrap: [B] float, the value behind the last token: 0 if the episode ended, V(s_T) if it was cut off.
        gamma: discount for each step, 0 to 1.
        lam: 0 to 1; 0 trusts the values alone, 1 the rewards alone.
        masked: "skip": tokens under mask 0 are no steps, the state after a token is the one before the next that the
            policy sampled. "zero": they are steps with reward 0 and value 0. For every token to be a step, give a mask
            of ones.

    Raises: ValueError if shapes do not fit, gamma or lam is outside 0 to 1, or `masked` is unknown.
    Source: GAE, arXiv:1506.02438, eq. 16; bootstrap of cut-off episodes, arXiv:1712.00378.
    """
    tokens, samples = (int(cu_seqlens[-1]),), (len(cu_seqlens) - 1,)
    if not (token_rewards.shape == values.shape == mask.shape == tokens and bootstrap.shape == samples):
        raise ValueError(
            f"cu_seqlens tells of {samples[0]} samples with {tokens[0]} tokens, but token_rewards, values, mask and "
            f"bootstrap are {token_rewards.shape}, {values.shape}, {mask.shape} and {bootstrap.shape}"
        )
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam {lam}; both lie between 0 and 1")
    if masked not in MASKED_KINDS:
        raise ValueError(
            f"tokens under mask 0 cannot be treated as {masked!r}; choose one of {', '.join(MASKED_KINDS)}"
        )
    on = mask != 0
    steps = np.flatnonzero(on) if masked == "skip" else np.arange(tokens[0])
    rewards = np.where(on, token_rewards, 0.0)[steps].astype(np.float64)
    before = np.where(on, values, 0.0)[steps].astype(np.float64)
    borders = np.searchsorted(steps, cu_seqlens)
    advantages = np.zeros(tokens)
    advantages[steps] = _backwards(rewards, before, borders, bootstrap.astype(np.float64), gamma, lam)
    advantages[~on] = 0.0
    return Gae(advantages, np.where(on, advantages + np.where(on, values, 0.0), 0.0))


def _backwards(
    rewards: FloatArray, values: FloatArray, borders: npt.NDArray[Any], bootstrap: FloatArray, gamma: float, lam: float
) -> FloatArray:
    """The recursion, one step of all samples at a time, from their ends."""
    advantages = np.zeros(len(rewards))
    lengths = np.diff(borders)
    next_value, next_advantage = bootstrap.copy(), np.zeros(len(bootstrap))
    for k in range(1, int(lengths.max(initial=0)) + 1):
        alive = np.flatnonzero(lengths >= k)
        at = borders[alive + 1] - k
        delta = rewards[at] + gamma * next_value[alive] - values[at]
        advantages[at] = next_advantage[alive] = delta + gamma * lam * next_advantage[alive]
        next_value[alive] = values[at]
    return advantages
