"""REINFORCE++: a return for each token, whitened over all tokens of the rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vime.algo.advantages import AdvantageInputs, FloatArray, dr_grpo
from vime.algo.gae import gae


def reinforce_plus_plus(inputs: AdvantageInputs) -> FloatArray:
    """The discounted return of each token, before whitening. [T], 0 under mask 0.

    r_t = -penalty_t, and the sample's reward at its last token under mask 1 besides; G_t = r_t + gamma G_t', with t'
    the next token under mask 1: what tools wrote is no step.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    nothing = np.zeros(len(inputs.mask))
    # The advantage over a value of 0 with lambda 1 is the return.
    return gae(
        token_rewards(inputs),
        nothing,
        inputs.mask,
        inputs.cu_seqlens,
        np.zeros(len(inputs.rewards)),
        gamma=inputs.gamma,
        lam=1.0,
    ).advantages


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> FloatArray:
    """A_t = (R - mean of the group) - penalty_t, before whitening. [T], 0 under mask 0.

    The mean is over the group's trajectories, the reward's own included, and of rewards without penalties.

    Source: REINFORCE++-baseline, arXiv:2501.03262.
    """
    per_token = np.repeat(dr_grpo(replace(inputs, token_penalties=None)), np.diff(inputs.cu_seqlens))
    if inputs.token_penalties is not None:
        per_token = per_token - inputs.token_penalties
    advantages: FloatArray = np.where(inputs.mask != 0, per_token, 0.0)
    return advantages


def token_rewards(inputs: AdvantageInputs) -> FloatArray:
    """[T] minus the penalties, and each sample's reward at its last token under mask 1 besides; 0 under mask 0."""
    on = inputs.mask != 0
    rewards = np.zeros(len(on)) if inputs.token_penalties is None else np.where(on, -inputs.token_penalties, 0.0)
    sample = np.repeat(np.arange(len(inputs.rewards)), np.diff(inputs.cu_seqlens))[on]
    if len(sample):
        ends = np.append(sample[1:] != sample[:-1], True)
        rewards[np.flatnonzero(on)[ends]] += inputs.rewards[sample[ends]]
    return rewards
