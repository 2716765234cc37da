"""The policies that a run compares its own with: their weights, in host memory, and when they change.

The reference stays what --ref-load is, or the policy as the run began. With --ref-update-interval it becomes the policy
every so many rollouts. One that no setting names (it moved, or --finetune began with a checkpoint's weights) is part of
each checkpoint. A teacher never changes. With --keep-old-actor the weights of the two newest versions that
engines got are kept: when a rollout is trained on that was generated beside training, engines may have got another
version since, and no third.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vime.batch_columns import POLICY_VERSIONS, TEACHER_LOG_PROBS
from vime.config import Config
from vime.config.estimators import needs_reference
from vime.errors import TrainingError
from vime.models import ModelSettings, NameMap, family_of
from vime.models.stored import same_architecture
from vime.trainer.megatron.weights import hf_io
from vime.trainer.megatron.weights.host_weights import HostWeights
from vime.trainer.megatron.weights.own_teacher import OwnTeacher
from vime.trainer.megatron.weights.reference import load_reference
from vime.types import Metrics, PolicyVersion, TrainBatch

_log = logging.getLogger(__name__)

LogProbs: TypeAlias = Callable[[npt.NDArray[np.bool_], str], npt.NDArray[np.float32]]
"""(wanted [T], prefix for users' hooks) -> [T] log-probs."""
Timed: TypeAlias = Callable[[str], AbstractContextManager[None]]

_VERSIONS_KEPT = 2
_REFERENCE = "reference_rollout"
"""The counter in a checkpoint that says of which rollout's weights its reference is."""
_FIRST = -1  # of no rollout: what it was when the run began


def _teacher(
    config: Config,
    folder: Path,
    source: Path,
    chunks: Sequence[torch.nn.Module],
    model: ModelSettings,
    names: NameMap,
    dtype: torch.dtype,
    device_type: str,
) -> HostWeights | OwnTeacher:
    """Weights that trade places with the policy's where they fit its modules; else a model of its own."""
    settings = family_of(hf := hf_io.read_config(folder)).settings(hf)
    if same_architecture(settings, model):
        return load_reference(
            folder, chunks, model, names, policy_folder=source, dtype=dtype, flag="--opd-teacher-load"
        )
    return OwnTeacher(config, folder, model, dtype, device_type=device_type)


class OtherPolicies:
    """Of one rank, on the policy's modules.

    Args:
        source: the policy's HF checkpoint.
        chunks: this rank's part of the policy, as it is trained.
        model, names: its settings and tensors.
        dtype: of its weights.
        device_type: "cpu" or "cuda".
    Raises: ConfigError if --ref-load cannot be the reference, or --opd-teacher-load the teacher.
    """

    def __init__(
        self,
        config: Config,
        source: Path,
        chunks: Sequence[torch.nn.Module],
        model: ModelSettings,
        names: NameMap,
        dtype: torch.dtype,
        *,
        device_type: str,
    ) -> None:
        self._config = config
        self.reference: HostWeights | None = None
        self._reference_rollout, self._is_kept = _FIRST, False
        if needs_reference(config.algo):
            folder = Path(config.checkpoint.ref_load or source)
            self.reference = load_reference(folder, chunks, model, names, policy_folder=source, dtype=dtype)
        self.teacher: HostWeights | OwnTeacher | None = None
        if config.algo.use_opd and (load := config.teacher.opd_teacher_load) is not None:
            self.teacher = _teacher(config, Path(load), source, chunks, model, names, dtype, device_type)
        self._chunks = chunks
        self._sent: dict[PolicyVersion, HostWeights] = {}

    def with_teacher(
        self, batch: TrainBatch, mask: npt.NDArray[np.bool_], log_probs: LogProbs, timed: Timed
    ) -> TrainBatch:
        """The batch with the teacher's log-probs, where it is taught and has none. Collective.

        Args:
            mask: [T] the tokens that are trained on.
            log_probs: of the batch under the weights that the modules have.
            timed: around what takes long, by its name.
        Raises: TrainingError if there is no teacher to ask.
        """
        if not self._config.algo.use_opd or self._config.algo.loss_type == "sft_loss":
            return batch
        if self.teacher is None:
            if TEACHER_LOG_PROBS not in batch.extra:
                raise TrainingError(
                    f"rollout {batch.rollout_id} came without a teacher's log-probs, and --opd-teacher-load names none"
                )
            return batch
        with timed("teacher_log_probs"):
            if isinstance(self.teacher, OwnTeacher):
                values = self.teacher.log_probs(batch, mask)
            else:
                with self.teacher.in_place():
                    values = log_probs(mask, "teacher_")
        return replace(batch, extra={**batch.extra, TEACHER_LOG_PROBS: values})

    def published(self, version: PolicyVersion) -> None:
        """The policy's weights go to the engines as this version."""
        if not self._config.algo.keep_old_actor:
            return
        if version not in self._sent and len(self._sent) == _VERSIONS_KEPT:
            self._sent[version] = self._sent.pop(min(self._sent))
        if version in self._sent:
            self._sent[version].take()
        else:
            self._sent[version] = HostWeights(self._chunks)

    def log_probs_of_sampler(
        self,
        batch: TrainBatch,
        mask: npt.NDArray[np.bool_],
        now: npt.NDArray[np.float32] | None,
        log_probs: LogProbs,
        timed: Timed,
        metrics: Metrics,
    ) -> npt.NDArray[np.float32] | None:
        """[T] of a rollout of earlier versions with --keep-old-actor: of their weights where kept, else the engine's.

        Collective. Other arguments as above.

        Args:
            now: the policy's, where they are known: what all other rollouts get.
            metrics: train/old_actor_ratio goes there.
        """
        if not (self._config.algo.keep_old_actor and batch.is_older):
            return now
        column, versions = batch.rollout_log_probs.copy(), batch.extra[POLICY_VERSIONS]
        known = np.zeros(len(mask), np.bool_)
        with timed("old_actor_log_probs"):
            for version, weights in self._sent.items():
                own = mask & (versions == version)
                if own.any():
                    with weights.in_place():
                        column[own] = log_probs(own, "old_actor_")[own]
                    known |= own
        metrics["train/old_actor_ratio"] = float(known.sum() / max(mask.sum(), 1))
        return column

    def trained(self, rollout_id: int) -> Metrics:
        """The policy was trained on this rollout. Returns: the one whose weights the reference is, where it moves."""
        interval = self._config.algo.ref_update_interval
        if self.reference is None or (interval is None and self._reference_rollout == _FIRST):
            return {}
        if interval is not None and (rollout_id + 1) % interval == 0:
            self.reference.take()
            self._reference_rollout, self._is_kept = rollout_id, True
        return {"train/reference_rollout": float(self._reference_rollout)}

    # Checkpoints

    def to_save(self) -> HostWeights | None:
        """The reference, where it is not what the settings name."""
        return self.reference if self._is_kept else None

    def counters(self) -> dict[str, int]:
        """What a checkpoint says of it."""
        return {_REFERENCE: self._reference_rollout} if self._is_kept else {}

    def loaded(self, counters: dict[str, int]) -> None:
        """A checkpoint was loaded, its reference too where it has one. Args: counters: as it has them."""
        self._is_kept = self.reference is not None and _REFERENCE in counters
        self._reference_rollout = counters[_REFERENCE] if self._is_kept else _FIRST
        if self._is_kept and dist.get_rank() == 0:
            named = self._config.checkpoint.ref_load
            rollout = self._reference_rollout
            _log.warning(
                "the reference is the checkpoint's, of the weights %s%s",
                "that its run began with" if rollout == _FIRST else f"after rollout {rollout}",
                f", not --ref-load {named}" if named is not None else "",
            )

    def weights_loaded(self) -> None:
        """The run begins with a checkpoint's weights (--finetune): they are the reference, unless another is named."""
        if self.reference is not None and self._config.checkpoint.ref_load is None:
            self.reference.take()
            self._reference_rollout, self._is_kept = _FIRST, True

    def close(self) -> None:
        """Give the host memory back."""
        for weights in (self.reference, self.teacher, *self._sent.values()):
            if weights is not None:
                weights.close()
