"""The correction for the mismatch of engine and trainer, as the run is configured: weights of a micro-batch's tokens,
and the batch without the tokens that are rejected.

P tokens under mask 1, T of the batch, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.algo.correction import importance_weights, rejection
from vime.algo.mismatch import trajectory_mean
from vime.algo.sequences import Sequences
from vime.config import AlgoConfig, Config
from vime.errors import ConfigError
from vime.protocols import CorrectionInputs
from vime.trainer.megatron.user_hooks import reweighted
from vime.types import CORRECTION_WEIGHTS, PG_WEIGHTS, Metrics, TrainBatch

OwnWeights: TypeAlias = Callable[[CorrectionInputs], tuple[Tensor, Mapping[str, float]]]


class Correction(NamedTuple):
    """Of P tokens."""

    weights: Tensor
    """[P] what the policy loss is multiplied with; 0 where the token is rejected."""
    kept: Tensor
    """[P] bool: the token is not rejected."""
    logged: dict[str, Tensor]
    """[P] each, by its name under train/."""


def logged_names(algo: AlgoConfig) -> list[str]:
    """What is logged of it, by its name under train/."""
    names = ["tis_weight"] if algo.corrects else []
    if algo.use_tis and algo.custom_tis_function_path is None:
        names += ["tis", "tis_abs", "tis_clipfrac", "tis_clipfrac_low", "tis_clipfrac_high"]
    return names + (["rs_rejected", "rs_vetoed"] if algo.use_rs else [])


def correction(
    log_ratio: Tensor, sequences: Sequences, algo: AlgoConfig, own_weights: Tensor | None = None
) -> Correction:
    """The weights of P tokens.

    Args:
        log_ratio: [P] the trainer's log-prob before the first step less the engine's.
        own_weights: [P] of --custom-tis-function-path, in place of those of --tis-*.
    """
    log_ratio = log_ratio.detach()
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    weights = torch.ones_like(log_ratio)
    logged: dict[str, Tensor] = {}
    if own_weights is not None:
        weights = own_weights
    elif algo.use_tis:
        of_ratio = importance_weights(
            log_ratio, sequences, level=algo.tis_level, mode=algo.tis_mode, low=algo.tis_clip_low, high=algo.tis_clip
        )
        weights, outside = of_ratio.weights, of_ratio.below | of_ratio.above
        kept = kept & ~outside if algo.tis_mode == "mask" else kept
        logged |= {
            "tis": of_ratio.ratio,
            "tis_abs": (of_ratio.ratio - 1).abs(),
            "tis_clipfrac": outside,
            "tis_clipfrac_low": of_ratio.below,
            "tis_clipfrac_high": of_ratio.above,
        }
    if algo.use_rs:
        bounds = dict(low=algo.rs_lower_bound, high=algo.rs_upper_bound, veto=algo.rs_veto_threshold)
        result = rejection(log_ratio, sequences, level=algo.rs_level, **bounds)
        kept = kept & result.kept
        logged |= {"rs_rejected": ~result.kept, "rs_vetoed": result.vetoed}
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    return Correction(weights, kept, logged | {"tis_weight": weights})


def without_rejected(
    batch: TrainBatch, log_probs: npt.NDArray[np.float32], config: Config
) -> tuple[TrainBatch, Metrics]:
    """The batch as if the rejected tokens had never been under mask 1, with the others' weights, and the metrics.

    Args: log_probs: [T] the trainer's before the first step, of the tokens under mask 1.
    Raises: ConfigError if weights of the policy loss were made for all of them.
    """
    if PG_WEIGHTS in batch.extra:
        raise ConfigError(
            f"--rejected-tokens removed cannot weight anew the tokens that are left, as extra[{PG_WEIGHTS!r}] has "
            "weights of its own for the policy loss; use counted"
        )
    on = batch.loss_mask != 0
    samples = np.repeat(np.arange(batch.num_samples), batch.lengths)
    counts = np.add.reduceat(batch.loss_mask.astype(np.float32), batch.cu_seqlens[:-1])
    sequences = Sequences(torch.from_numpy(samples[on]), torch.from_numpy(counts))
    log_ratio = torch.from_numpy((log_probs - batch.rollout_log_probs)[on])
    result = correction(log_ratio, sequences, config.algo)

    def column(values: Tensor) -> npt.NDArray[np.float32]:
        out = np.zeros(len(on), np.float32)
        out[on] = values.numpy()
        return out

    trajectories = np.repeat(batch.trajectory_ids, batch.lengths)
    num = len(np.unique(batch.trajectory_ids))
    metrics = {
        f"train/{name}": trajectory_mean(column(values), batch.loss_mask, trajectories, num)
        for name, values in result.logged.items()
    }
    extra = {**batch.extra, CORRECTION_WEIGHTS: column(result.weights)}
    left = replace(batch, loss_mask=column(result.kept).astype(np.uint8), extra=extra)
    return reweighted(left, config), metrics
