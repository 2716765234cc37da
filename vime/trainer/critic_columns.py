"""What the policy's ranks and a critic's own ranks tell each other of a rollout: columns of one batch.

T tokens of the batch, B samples. Both sides have the same samples in the same order, so that a column means the same to
both, however each cuts the batch into micro-batches of its ranks. No torch here: the driver hands the columns on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Values:
    """What the critic says of a batch."""

    of_tokens: npt.NDArray[np.float32]
    """[T] the value of the state before each token; NaN where it was not wanted."""
    at_end: npt.NDArray[np.float32]
    """[B] V(s_T), the value behind the last token, of samples that were cut off; 0 for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTargets:
    """What the critic is trained on, made of its values by those who have the log-probs; [T] each."""

    rollout_id: int
    mask: npt.NDArray[np.uint8]
    """1 where a value is trained."""
    weights: npt.NDArray[np.float32]
    """What each token's loss is multiplied with; see `vime.types.TrainBatch.loss_weights`."""
    metric_weights: npt.NDArray[np.float32] | None
    """For metrics, where those are others."""
    values: npt.NDArray[np.float32]
    """Before training on the rollout began."""
    returns: npt.NDArray[np.float32]
