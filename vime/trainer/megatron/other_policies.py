"""The policies that a run compares its own with: their weights, in host memory, and when they change.

The reference stays what --ref-load is, or with --ref-update-interval becomes the policy every so many rollouts; then it
is part of each checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from vime.config import Config
from vime.config.estimators import needs_reference
from vime.models import ModelSettings, NameMap
from vime.trainer.megatron.host_weights import HostWeights
from vime.trainer.megatron.reference import load_reference
from vime.types import Metrics

_log = logging.getLogger(__name__)

_REFERENCE = "reference_rollout"
"""The counter in a checkpoint that says of which rollout's weights its reference is."""
_AS_LOADED = -1


class OtherPolicies:
    """Of one rank, on the policy's modules.

    Args:
        source: the policy's HF checkpoint.
        chunks: this rank's part of the policy, as it is trained.
        model, names: its settings and tensors.
        dtype: of its weights.
    Raises: ConfigError if --ref-load cannot be the reference.
    """

    def __init__(
        self,
        config: Config,
        source: Path,
        chunks: Sequence[torch.nn.Module],
        model: ModelSettings,
        names: NameMap,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self.reference: HostWeights | None = None
        self._reference_rollout = _AS_LOADED
        if needs_reference(config.algo):
            folder = Path(config.checkpoint.ref_load or source)
            self.reference = load_reference(folder, chunks, model, names, policy_folder=source, dtype=dtype)

    def trained(self, rollout_id: int) -> Metrics:
        """The policy was trained on this rollout. Returns: the one whose weights the reference is, where it moves."""
        interval = self._config.algo.ref_update_interval
        if self.reference is None or (interval is None and not self._has_moved):
            return {}
        if interval is not None and (rollout_id + 1) % interval == 0:
            self.reference.take()
            self._reference_rollout = rollout_id
        return {"train/reference_rollout": float(self._reference_rollout)}

    @property
    def _has_moved(self) -> bool:
        return self._reference_rollout != _AS_LOADED

    # Checkpoints

    def to_save(self) -> HostWeights | None:
        """The reference, where it is not what the settings name."""
        return self.reference if self._has_moved else None

    def counters(self) -> dict[str, int]:
        """What a checkpoint says of it."""
        return {_REFERENCE: self._reference_rollout} if self._has_moved else {}

    def loaded(self, counters: dict[str, int]) -> None:
        """A checkpoint was loaded, its reference too where it has one. Args: counters: as it has them."""
        self._reference_rollout = counters.get(_REFERENCE, _AS_LOADED) if self.reference is not None else _AS_LOADED
        if self._has_moved and dist.get_rank() == 0:
            named = self._config.checkpoint.ref_load
            instead = f", not --ref-load {named}, with which the run was started" if named is not None else ""
            _log.warning(
                "the reference is the checkpoint's, of the weights after rollout %d%s", self._reference_rollout, instead
            )

    def close(self) -> None:
        """Give the host memory back."""
        if self.reference is not None:
            self.reference.close()
