"""The log-probs of engine, trainer and reference on one rollout, and how far the first two are apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vime.algo.mismatch import log_prob_abs_diff, ratio_figures, trajectory_mean
from vime.types import Metrics, TrainBatch


def agreement_metrics(
    batch: TrainBatch,
    mask: npt.NDArray[np.bool_],
    old: npt.NDArray[np.float32],
    reference: npt.NDArray[np.float32] | None,
) -> Metrics:
    """Metrics over the trainable tokens, before the first update on the rollout.

    Args: mask: [T] true where the token is trained on. old, reference: [T] the trainer's and the reference's log-probs.
    """
    trajectories = np.repeat(batch.trajectory_ids, batch.lengths)
    num = len(np.unique(batch.trajectory_ids))
    diff = log_prob_abs_diff(old, batch.rollout_log_probs, mask, trajectories, num)
    columns = {"rollout_log_probs": batch.rollout_log_probs, "log_probs": old, "ref_log_probs": reference}
    means = {
        f"rollout/{name}": trajectory_mean(column, mask, trajectories, num)
        for name, column in columns.items()
        if column is not None
    }
    samples = np.repeat(np.arange(batch.num_samples), batch.lengths)
    figures = ratio_figures(old, batch.rollout_log_probs, mask, trajectories, samples, num)
    both = "train/train_rollout"
    return means | {
        f"{both}_logprob_abs_diff": diff.mean,
        f"{both}_logprob_abs_diff_p99": diff.p99,
        f"{both}_logprob_abs_diff_max": diff.max,
        f"{both}_k3_kl": figures.k3_kl,
        f"{both}_ratio": figures.ratio,
        f"{both}_ess": figures.ess,
        f"{both}_sequence_ess": figures.sequence_ess,
    }
