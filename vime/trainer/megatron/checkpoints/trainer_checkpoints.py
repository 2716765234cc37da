"""A trainer's checkpoints: what of it goes into one, which of them is being written, and what comes back from one."""

from __future__ import annotations

from pathlib import Path

from vime.config import CheckpointConfig
from vime.trainer.megatron.checkpoints import checkpoint, saving
from vime.trainer.megatron.nn.model import Policy
from vime.trainer.megatron.weights.other_policies import OtherPolicies

_STEP = "step"


class TrainerCheckpoints:
    """Of one rank. Every method but `close` is collective.

    Args:
        policy, critic: what is trained.
        others: the policies that it is compared with; a reference that moved is part of a checkpoint.
    """

    def __init__(
        self, settings: CheckpointConfig, policy: Policy, critic: Policy | None, others: OtherPolicies
    ) -> None:
        self._settings, self._policy, self._critic, self._others = settings, policy, critic, others
        self._save: saving.Save | None = None

    def begin(self, path: Path, *, step: int, in_background: bool) -> None:
        """Start to write model, optimizer, scheduler, random state and the optimizer step under `path`."""
        assert self._save is None, "a checkpoint is being written"
        self._save = checkpoint.begin_save(
            self._policy,
            path,
            counters={_STEP: step, **self._others.counters()},
            with_optimizer=not self._settings.no_save_optim,
            in_background=in_background,
            critic=self._critic,
            reference=self._others.to_save(),
        )

    def end(self, wait: bool) -> bool:
        """Whether the checkpoint that was begun is whole now. Args: wait: until it is.

        Raises: TrainingError naming the ranks that could not write, and why.
        """
        assert self._save is not None, "no checkpoint was begun"
        save, self._save = self._save, None  # after an error, too
        if not save.end(wait=wait):
            self._save = save
        return self._save is None

    def load(self, path: Path) -> int:
        """Bring back what `begin` wrote; with --finetune the weights alone.

        Returns: the optimizer step to go on with.
        Raises: ConfigError if `path` is no checkpoint of this model.
        """
        finetune = self._settings.finetune
        counters = checkpoint.load(
            self._policy,
            path,
            with_optimizer=not (self._settings.no_load_optim or finetune),
            critic=self._critic,
            reference=None if finetune else self._others.reference,
        )
        if finetune:
            self._others.weights_loaded()
            return 0
        self._others.loaded(counters)
        return counters[_STEP]

    def close(self) -> None:
        """What is being written stays unfinished, under its hidden name."""
        if self._save is not None:
            self._save.abandon()
