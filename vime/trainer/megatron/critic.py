"""PPO's critic on a rank: beside the policy, or on ranks of its own; a model with an optimizer of its own.

T tokens of a batch, B samples. Every method is collective. The order in a rollout: `values`, then the advantages that
`vime.algo` makes of them, then `train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.algo.value_loss import value_loss
from vime.config import Config, CriticConfig, TrainConfig
from vime.config.critic_ranks import critic_layout
from vime.errors import ConfigError
from vime.models import ModelSettings, NameMap, family_of
from vime.models.stored import reference_problem
from vime.models.value_head import trunk_config
from vime.trainer.critic_columns import Values
from vime.trainer.megatron import forward, parallel, settings
from vime.trainer.megatron.batches import packing
from vime.trainer.megatron.batches.packing import MicroBatch
from vime.trainer.megatron.nn import model
from vime.trainer.megatron.nn.critic_model import CriticModel, load_critic
from vime.trainer.megatron.optimizers.optimizer_step import Update, optimizer_step
from vime.trainer.megatron.weights import hf_io
from vime.types import METRIC_WEIGHTS, RETURNS, VALUES, Metrics, TrainBatch

SUMS = ("value_loss", "value_clipfrac")
"""What is summed over a step's tokens, each weighted with loss_weights."""
_TEMPERATURE = 1.0  # of log-probs, which a critic has none of


class Critic:
    """Built on all ranks at the same time, when their process groups are there.

    Args:
        source: folder of the policy's HF checkpoint.
        of_policy, names: its settings and tensors.
        own: Megatron's settings of the critic (`critic_settings`).
        layout: of its ranks' micro-batches.
        total_steps: optimizer steps of the whole run.
    Raises: ConfigError if --critic-load is of another architecture, or no checkpoint.
    """

    def __init__(
        self,
        config: Config,
        source: Path,
        of_policy: ModelSettings,
        names: NameMap,
        own: settings.MegatronSettings,
        layout: packing.Layout,
        *,
        total_steps: int,
    ) -> None:
        self._config, self._layout, self._settings, self._sizes = config, layout, own, own.sizes
        folder = source
        if config.critic.critic_load is not None:
            folder = Path(config.critic.critic_load)
            hf = trunk_config(hf_io.read_config(folder), tied=of_policy.tie_word_embeddings)
            of_folder = family_of(hf).settings(hf)
            if problem := reference_problem(folder, of_folder, of_policy, policy_folder=source, flag="--critic-load"):
                raise ConfigError(problem)
        self._model = of_policy
        chunks, self._forward = model.build_chunks(self._settings, self._chunk)
        load_critic(chunks, folder, names, of_policy)
        self.trained = model.build_policy(
            chunks, self._forward, self._settings, critic_schedule(config.train, config.critic), total_steps=total_steps
        )
        """The model and what trains it."""

    def _chunk(self, chunk: int) -> CriticModel:
        return CriticModel(self._model, self._settings, chunk=chunk)

    def values(self, batch: TrainBatch, wanted: npt.NDArray[np.bool_], cut_off: npt.NDArray[np.bool_]) -> Values:
        """Values of the current weights.

        Args:
            wanted: [T] True where the value before a token is wanted; never at a sample's first token.
            cut_off: [B] True for samples whose last state's value is wanted.
        """
        longer = _with_a_last_state(batch, wanted, cut_off)
        limit = self._config.train.log_probs_max_tokens_per_gpu
        mine = forward.micro_batches_without_gradients(batch, self._model, self._sizes, limit=limit)
        out = forward.shared_log_probs(
            self._forward,
            longer.tokens,
            longer.cu_seqlens,
            mine,
            longer.wanted,
            layout=self._layout,
            temperature=_TEMPERATURE,
        )
        at_end = np.zeros(batch.num_samples, np.float32)
        at_end[cut_off] = out[longer.ends[cut_off]]
        return Values(out[longer.places], at_end)

    def train(self, batch: TrainBatch, mask: npt.NDArray[np.bool_]) -> Metrics:
        """One optimizer step per plan in `batch.steps`, towards `batch.extra["returns"]`.

        Returns: train/critic-*, means over the steps. Raises: TrainingError if a loss or gradient is not finite.
        """
        updates = [self._step(batch, k, mask) for k in range(len(batch.steps))]
        self.trained.finish_param_gather()
        metrics = {f"train/critic-{n}": sum(u.sums[n] for u in updates) / len(updates) for n in SUMS}
        metrics["train/critic-grad_norm"] = sum(u.grad_norm for u in updates) / len(updates)
        metrics["train/critic-lr-pg_0"] = updates[-1].learning_rate
        return metrics

    def _step(self, batch: TrainBatch, k: int, mask: npt.NDArray[np.bool_]) -> Update:
        plan = forward.filled_up(batch.steps[k][parallel.dp_rank()], self._layout.group)
        micro_batches = (
            packing.pack(batch.tokens, batch.cu_seqlens, samples, mask, layout=self._layout, temperature=_TEMPERATURE)
            for samples in plan
        )
        own = self._config.critic

        def loss_of(out: tuple[Tensor], micro: MicroBatch) -> tuple[Tensor, Tensor]:
            (values,) = out

            def column(of_batch: npt.NDArray[Any]) -> Tensor:
                return torch.from_numpy(of_batch[micro.wanted]).to(values.device, non_blocking=True)

            weights, of_metrics = column(batch.loss_weights), batch.extra.get(METRIC_WEIGHTS)
            result = value_loss(
                values, column(batch.extra[VALUES]), column(batch.extra[RETURNS]), clip=own.value_clip or None
            )
            loss = own.value_loss_coef * (weights * result.loss).sum()
            clipped = (weights if of_metrics is None else column(of_metrics)) * result.clipped
            return loss, torch.stack([loss.detach(), clipped.sum()])

        return optimizer_step(
            self.trained,
            micro_batches,
            len(plan),
            loss_of,
            names=SUMS,
            where=f"of the critic in rollout {batch.rollout_id}, step {k} of this rollout",
            suspects="rewards",
            lr_flag="--critic-lr",
        )


def critic_settings(
    config: Config, of_policy: ModelSettings, *, device_type: str, world_size: int
) -> settings.MegatronSettings:
    """Megatron's settings of the critic. Args: world_size: ranks that have it. Raises: ConfigError."""
    megatron = critic_layout(config.megatron, config.critic)
    overrides = critic_overrides(megatron, config.critic)
    return settings.megatron_settings(of_policy, overrides, device_type=device_type, world_size=world_size)


def critic_overrides(megatron: Mapping[str, Any], critic: CriticConfig) -> dict[str, Any]:
    """Megatron's settings of the critic: the policy's, and those of its optimizer that were given for it."""
    own = {"lr": critic.critic_lr, "clip_grad": critic.critic_clip_grad, "weight_decay": critic.critic_weight_decay}
    overrides = {**megatron, **{name: value for name, value in own.items() if value is not None}}
    if overrides.get("min_lr") is not None and critic.critic_lr is not None:
        overrides["min_lr"] = min(overrides["min_lr"], critic.critic_lr)
    return overrides


def critic_schedule(train: TrainConfig, critic: CriticConfig) -> TrainConfig:
    """The policy's learning-rate schedule with the critic's own warm-up."""
    init = min(train.lr_warmup_init, critic.critic_lr) if critic.critic_lr is not None else train.lr_warmup_init
    return replace(train, lr_warmup_iters=critic.critic_lr_warmup_iters, lr_warmup_init=init)


@dataclass(frozen=True, slots=True)
class _Longer:
    """A batch whose cut-off samples have one token more, so that something follows their last state."""

    tokens: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.bool_]
    places: npt.NDArray[np.int64]
    """[T] where each token of the batch went."""
    ends: npt.NDArray[np.int64]
    """[B] the last place of each sample."""


def _with_a_last_state(batch: TrainBatch, wanted: npt.NDArray[np.bool_], cut_off: npt.NDArray[np.bool_]) -> _Longer:
    """A value is asked for by the token that follows its state; attention is causal, so any will do."""
    more = cut_off.astype(np.int64)
    places = np.arange(len(batch.tokens)) + np.repeat(np.cumsum(more) - more, batch.lengths)
    cu_seqlens = np.concatenate([[0], np.cumsum(batch.lengths + more)])
    tokens = np.zeros(cu_seqlens[-1], np.int32)
    longer_wanted = np.zeros(cu_seqlens[-1], np.bool_)
    tokens[places], longer_wanted[places] = batch.tokens, wanted
    ends = cu_seqlens[1:] - 1
    longer_wanted[ends[cut_off]] = True
    return _Longer(tokens, cu_seqlens, longer_wanted, places, ends)
