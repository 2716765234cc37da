"""From the name of an estimator to the advantages of a rollout."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from vime.algo.advantages import AdvantageInputs, FloatArray, raw_rewards
from vime.algo.whiten import whiten
from vime.config.estimators import ESTIMATORS

EstimatorFunction: TypeAlias = Callable[[AdvantageInputs], FloatArray]


class Advantages(NamedTuple):
    """Of one rollout."""

    per_sample: FloatArray
    """[B]; where they differ from token to token, their mean over the sample's tokens under mask 1."""
    per_token: FloatArray | None
    """[T], 0 under mask 0; None where all tokens of a sample have the same."""


def estimator_function(name: str) -> EstimatorFunction:
    """The function behind a value of --advantage-estimator. Raises: KeyError."""
    module, _, function = ESTIMATORS[name].function.rpartition(".")
    return cast(EstimatorFunction, getattr(importlib.import_module(module), function))


def estimate(name: str, inputs: AdvantageInputs, *, raw: bool = False, whitened: bool = False) -> Advantages:
    """Advantages by the estimator of this name.

    Args:
        raw: leave rewards as they are instead (--disable-rewards-normalization).
        whitened: bring them to mean 0 and variance 1 over all tokens under mask 1 (`vime.algo.whiten`).
    Raises: ValueError if lengths differ, a reward or penalty is not finite, or siblings differ in group or reward.
    """
    _check(inputs)
    values = raw_rewards(inputs) if raw else estimator_function(name)(inputs)
    lengths = np.diff(inputs.cu_seqlens)
    if whitened:
        per_token = values if len(values) == len(inputs.mask) else np.repeat(values, lengths)
        values = whiten(per_token, inputs.mask)
    if values.shape == inputs.rewards.shape and not whitened:
        return Advantages(values, None)
    return Advantages(sample_means(values, inputs), values)


def sample_means(per_token: FloatArray, inputs: AdvantageInputs) -> FloatArray:
    """[B] the mean of [T] over each sample's tokens under mask 1; 0 where it has none."""
    on = (inputs.mask != 0).astype(np.float64)
    sample = np.repeat(np.arange(len(inputs.rewards)), np.diff(inputs.cu_seqlens))
    total = np.bincount(sample, weights=np.where(on > 0, per_token, 0.0), minlength=len(inputs.rewards))
    means: FloatArray = total / np.maximum(np.bincount(sample, weights=on, minlength=len(inputs.rewards)), 1.0)
    return means


def _check(inputs: AdvantageInputs) -> None:
    b, t = len(inputs.cu_seqlens) - 1, int(inputs.cu_seqlens[-1])
    shapes = [x.shape for x in (inputs.rewards, inputs.group_ids, inputs.trajectory_ids)]
    if shapes != [(b,)] * 3 or inputs.mask.shape != (t,):
        raise ValueError(
            f"{b} samples of {t} tokens need [B] rewards and ids, a [T] mask: {shapes}, {inputs.mask.shape}"
        )
    if not np.isfinite(inputs.rewards).all():
        bad = int(np.argmin(np.isfinite(inputs.rewards)))
        raise ValueError(f"the reward of sample {bad} is {inputs.rewards[bad]}; every reward must be finite")
    if inputs.token_penalties is None:
        return
    if inputs.token_penalties.shape != (t,):
        raise ValueError(f"token_penalties has shape {inputs.token_penalties.shape}, expected ({t},)")
    if bad := int((~np.isfinite(inputs.token_penalties[inputs.mask != 0])).sum()):
        raise ValueError(f"{bad} tokens under mask 1 have a penalty that is not finite")
