"""PPO's critic on ranks of its own: what the policy's ranks are told of it, and what it is told, are columns.

The order in a rollout: `begin_values`, then `train`; the policy's trainer makes the targets between the two. Every
method is collective over the critic's ranks, which know nothing of the policy's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.config import Config
from vime.models import family_of
from vime.observability.trace import Span, SpanLog
from vime.platform.base import Platform
from vime.trainer.critic_columns import CriticTargets, Values
from vime.trainer.megatron import parallel, process, speed
from vime.trainer.megatron.batches.layout import layout_of
from vime.trainer.megatron.checkpoints import checkpoint, saving
from vime.trainer.megatron.critic import Critic, critic_settings
from vime.trainer.megatron.losses.ppo import all_but_first, critic_values, with_targets
from vime.trainer.megatron.weights import hf_io
from vime.types import Metrics, TrainBatch

VALUES_TIME, TRAIN_TIME = "critic_apart_values", "critic_apart_train"
"""Parts that are timed; they run beside the policy's, and count in no sum with them."""


class CriticTrainer:
    """One rank. Built on all of the critic's ranks at the same time; `close` before another is built in the process.

    Args: as `MegatronTrainer` takes them; rank and world_size are of the critic's own.
    Raises: ConfigError for a checkpoint or setting that cannot be trained.
    """

    def __init__(
        self,
        config: Config,
        *,
        hf_path: str,
        platform: Platform,
        rank: int,
        world_size: int,
        init_method: Any,
        total_steps: int,
    ) -> None:
        process.prepare(config, platform, rank)
        self._config, self._platform, self._spans = config, platform, SpanLog()
        source = Path(hf_path)
        family = family_of(hf := hf_io.read_config(source))
        model = family.settings(hf)
        own = critic_settings(config, model, device_type=platform.device_type, world_size=world_size)
        process.join(config, platform, own, rank=rank, world_size=world_size, init_method=init_method)
        try:
            layout = layout_of(model, own, platform.device_type)
            self._critic = Critic(config, source, model, family.name_map(model), own, layout, total_steps=total_steps)
        except BaseException:
            parallel.stop()
            raise
        self._batch: TrainBatch | None = None
        self._metrics: Metrics = {}
        self._save: saving.Save | None = None

    def values(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """[T] the value of the state before each token; NaN at each first token."""
        return self._critic.values(batch, all_but_first(batch), np.zeros(batch.num_samples, np.bool_)).of_tokens

    def begin_values(self, batch: TrainBatch) -> Values:
        """The values that advantages are made of. Args: batch: planned for these ranks; `train` goes on with it."""
        self._batch, self._metrics = batch, {}
        with speed.timed(self._metrics, self._spans, VALUES_TIME):
            return critic_values(self._critic, batch, self._config.critic)

    def train(self, targets: CriticTargets) -> Metrics:
        """One optimizer step per plan of the batch begun. Returns: train/critic-*, and the seconds of both parts.

        Raises: TrainingError if a loss or gradient is not finite; ValueError if the targets are another batch's.
        """
        assert self._batch is not None, "a rollout begins with `begin_values`"
        batch, metrics = with_targets(self._batch, targets), self._metrics
        self._batch = None
        with speed.timed(metrics, self._spans, TRAIN_TIME):
            metrics |= self._critic.train(batch, batch.loss_mask.astype(np.bool_))
        return metrics

    def take_spans(self) -> list[Span]:
        """What this rank was busy with since the last call; for the trace."""
        return self._spans.take()

    def save(self, path: Path) -> None:
        """Write it beside the trainer's part of a checkpoint. Args: path: of that part."""
        self._begin_save(path, in_background=False)
        self.end_save(wait=True)

    def begin_save(self, path: Path) -> None:
        """`save` in the background; `end_save` follows."""
        self._begin_save(path, in_background=True)

    def _begin_save(self, path: Path, *, in_background: bool) -> None:
        assert self._save is None, "a checkpoint is being written"
        self._save = checkpoint.begin_save_critic(
            self._critic.trained,
            checkpoint.critic_folder(Path(path)),
            with_optimizer=not self._config.checkpoint.no_save_optim,
            in_background=in_background,
        )

    def end_save(self, wait: bool) -> bool:
        """Whether what was begun is whole now. Raises: TrainingError naming the ranks that could not write."""
        assert self._save is not None, "no checkpoint was begun"
        save, self._save = self._save, None  # after an error, too
        if not save.end(wait=wait):
            self._save = save
        return self._save is None

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, or a critic that was saved with the policy. Args: path: of the trainer's part."""
        settings = self._config.checkpoint
        with_optimizer = not (settings.no_load_optim or settings.finetune)
        checkpoint.load_critic(self._critic.trained, Path(path), with_optimizer=with_optimizer)

    def close(self) -> None:
        """Leave the process groups; it cannot be used afterwards."""
        if self._save is not None:
            self._save.abandon()
        self._critic.trained.release()
        parallel.stop()
