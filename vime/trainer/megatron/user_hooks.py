"""Users' functions inside the trainer: called on every rank, their results checked.

B samples, T tokens of the batch; P wanted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from vime.algo.reduce import aggregation_weights, token_loss_weights
from vime.config import Config, hook_table
from vime.config.estimators import loss_agg_mode
from vime.config.hooks import UserFunction
from vime.data.packing import step_ids
from vime.protocols import CorrectionInputs, LossInputs, TrainerContext
from vime.trainer.megatron import parallel
from vime.trainer.megatron.nn.model import Policy, PolicyModel
from vime.types import METRIC_WEIGHTS, PG_WEIGHTS, TOKEN_ADVANTAGES, Metrics, TrainBatch

# What a function that changes the batch must leave as it is: the plan and the packing rest on them.
_FIXED = ("tokens", "cu_seqlens", "group_ids", "trajectory_ids")


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """The functions of a run that its trainer calls, where it has them."""

    context: TrainerContext
    init: UserFunction | None
    model_provider: UserFunction | None
    before_log_prob: UserFunction | None
    before_step: UserFunction | None
    advantage: UserFunction | None
    postprocess: UserFunction | None
    loss: UserFunction | None
    correction: UserFunction | None

    @classmethod
    def load(cls, config: Config, *, rank: int, world_size: int) -> TrainerHooks:
        """Those that the settings name. Raises: ConfigError."""
        find = partial(hook_table.load, config)
        return cls(
            TrainerContext(config, rank, world_size),
            init=find("train.custom_megatron_init_path"),
            model_provider=find("train.custom_model_provider_path"),
            before_log_prob=find("train.custom_megatron_before_log_prob_hook_path"),
            before_step=find("train.custom_megatron_before_train_step_hook_path"),
            advantage=find("algo.custom_advantage_function_path"),
            postprocess=find("rollout.rollout_data_postprocess_path"),
            loss=find("algo.custom_loss_function_path"),
            correction=find("algo.custom_tis_function_path"),
        )

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether the old policy's log-probs must be there before the first step."""
        return self.advantage is not None or self.postprocess is not None

    def start(self) -> None:
        """The process groups exist; the model does not yet."""
        if self.init is not None:
            self.init(self.context)

    def build(self, chunk: int, default: Callable[[], PolicyModel]) -> PolicyModel:
        """A chunk of the model, by --custom-model-provider-path if there is one.

        Raises: HookError if it is no PolicyModel.
        """
        if self.model_provider is None:
            return default()
        stage = (parallel.is_first_stage(chunk), parallel.is_last_stage(chunk))
        module = self.model_provider(self.context, *stage, default)
        if not isinstance(module, PolicyModel):
            raise self.model_provider.refuse(module, "a vime.trainer.megatron.nn.model.PolicyModel")
        return module

    def before_log_probs(self, chunks: Sequence[torch.nn.Module], store_prefix: str) -> None:
        """A forward pass without gradients comes. Args: store_prefix: "" for the policy, else of whose weights."""
        if self.before_log_prob is not None:
            self.before_log_prob(self.context, _one(chunks), store_prefix)

    def before_train_step(self, rollout_id: int, step_id: int, policy: Policy) -> None:
        """An optimizer step comes, the `step_id`-th of this rollout."""
        if self.before_step is not None:
            self.before_step(self.context, rollout_id, step_id, _one(policy.chunks), policy.optimizer, policy.scheduler)

    def prepare(self, batch: TrainBatch, **known: npt.NDArray[np.float32] | None) -> tuple[TrainBatch, Metrics]:
        """The batch with the user's advantages and changes, and the metrics of those advantages.

        Args: known: further [T] columns that the functions see in `batch.extra`, where they are known.
        """
        if not self.reads_old_log_probs:
            return batch, {}
        batch = replace(batch, extra={**batch.extra, **{name: c for name, c in known.items() if c is not None}})
        metrics: Metrics = {}
        if self.advantage is not None:
            batch = _with_advantages(self.advantage, batch, self.advantage(self.context, batch))
            metrics = advantage_metrics(batch)
        if self.postprocess is not None:
            changed = self.postprocess(self.context, batch.rollout_id, batch)
            batch = batch if changed is None else _checked_batch(self.postprocess, batch, changed, self.context.config)
        return batch, metrics

    def own_loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, float]]:
        """--custom-loss-function-path: this micro-batch's summand of the loss, and of the user's metrics."""
        assert self.loss is not None
        result = self.loss(self.context, inputs, inputs.sum_of_sample_mean)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.loss.refuse(result, "a tuple (loss, metrics)")
        value, metrics = result
        if not isinstance(value, Tensor) or value.shape != () or not (value.requires_grad or not len(inputs.tokens)):
            raise self.loss.refuse(value, "a tensor of shape () that leads back to log_probs, as loss")
        return value, _numbers(self.loss, metrics)

    def own_correction(self, inputs: CorrectionInputs) -> tuple[Tensor, dict[str, float]]:
        """--custom-tis-function-path: [P] this micro-batch's weights, and its summand of the user's metrics."""
        assert self.correction is not None
        result = self.correction(self.context, inputs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.correction.refuse(result, "a tuple (weights, metrics)")
        weights, metrics = result
        if not isinstance(weights, Tensor) or weights.shape != inputs.pg_loss.shape:
            raise self.correction.refuse(weights, f"a tensor of shape {tuple(inputs.pg_loss.shape)} as weights")
        if not (usable := torch.isfinite(weights)).all():
            raise self.correction.broken(f"gave {int((~usable).sum())} tokens a weight that is not finite")
        return weights.detach().to(inputs.pg_loss.dtype), _numbers(self.correction, metrics)


def _numbers(function: UserFunction, metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise function.refuse(metrics, "a dict as metrics")
    return {str(name): float(number) for name, number in metrics.items()}


def _one(chunks: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The model as users see it: itself, or on ranks of several pipeline stages a ModuleList of their chunks."""
    return chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)


def sum_own_metrics(own: Mapping[str, float], counts: bool) -> dict[str, float]:
    """The sum over all ranks of what each rank's loss function reported. Collective."""
    mine = dict(own) if counts else {}
    everyone: list[dict[str, float] | None] = [mine]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    total: dict[str, float] = {}
    for part in everyone:
        for name, value in (part or {}).items():
            total[name] = total.get(name, 0.0) + value
    return total


def _with_advantages(function: UserFunction, batch: TrainBatch, result: Any) -> TrainBatch:
    try:
        values = np.asarray(result, np.float32)
    except (TypeError, ValueError) as error:
        raise function.refuse(result, "an array of numbers") from error
    tokens = batch.tokens.shape
    if values.shape not in ((batch.num_samples,), tokens):
        raise function.broken(
            f"gave advantages of shape {values.shape}; ({batch.num_samples},), one a sample, or {tokens}, one a token, "
            "is expected"
        )
    per_token = values if values.shape == tokens else np.repeat(values, batch.lengths)
    if bad := int((~np.isfinite(per_token[batch.loss_mask != 0])).sum()):
        raise function.broken(f"gave {bad} tokens under mask 1 an advantage that is not finite")
    if values.shape == tokens:
        clean = np.where(batch.loss_mask != 0, values, np.float32(0))
        return replace(batch, extra={**batch.extra, TOKEN_ADVANTAGES: clean})
    return replace(batch, advantages=values)


def advantage_metrics(batch: TrainBatch) -> Metrics:
    """rollout/advantages over trajectories; of advantages per token, each sample's mean over tokens under mask 1."""
    values = batch.advantages
    if (per_token := batch.extra.get(TOKEN_ADVANTAGES)) is not None:
        starts = batch.cu_seqlens[:-1]
        count = np.add.reduceat(batch.loss_mask.astype(np.float64), starts)
        values = np.add.reduceat(per_token.astype(np.float64), starts) / np.maximum(count, 1)
    _, first = np.unique(batch.trajectory_ids, return_index=True)
    name = "rollout/advantages"
    chosen = values[first]
    return {name: float(chosen.mean()), f"{name}/min": float(chosen.min()), f"{name}/max": float(chosen.max())}


def _checked_batch(function: UserFunction, before: TrainBatch, after: Any, config: Config) -> TrainBatch:
    if not isinstance(after, TrainBatch):
        raise function.refuse(after, "a TrainBatch or None")
    for name in _FIXED:
        if not np.array_equal(getattr(before, name), getattr(after, name)):
            raise function.broken(f"changed {name}, on which the plan of the step rests; only values may change")
    if after.steps != before.steps:
        raise function.broken("changed the plan of the optimizer steps")
    if np.any(after.loss_mask > before.loss_mask):
        raise function.broken("put tokens under mask 1 that were under mask 0; nobody sampled them")
    if np.array_equal(after.loss_mask, before.loss_mask):
        return after
    if (own := after.extra.get(PG_WEIGHTS)) is not None and own is before.extra.get(PG_WEIGHTS):
        raise function.broken(
            f"changed loss_mask, but left extra[{PG_WEIGHTS!r}], which --custom-pg-loss-reducer-function-path made for "
            "the mask before; give both"
        )
    fitting = reweighted(after, config)
    given = after.loss_weights is not before.loss_weights
    return replace(fitting, loss_weights=after.loss_weights) if given else fitting


def reweighted(batch: TrainBatch, config: Config) -> TrainBatch:
    """The batch with the weights that fit its mask."""
    algo, mask, cu = config.algo, batch.loss_mask, batch.cu_seqlens
    weights = aggregation_weights(
        loss_agg_mode(algo),
        mask,
        cu,
        trajectory_ids=batch.trajectory_ids,
        step_ids=step_ids(batch.steps, batch.num_samples),
        n_global=batch.global_batch_size,
        length=algo.loss_agg_length or config.rollout.rollout_max_response_len,
    )
    extra = dict(batch.extra)
    if METRIC_WEIGHTS in extra:
        of_metrics = token_loss_weights(mask, cu, batch.trajectory_ids, batch.global_batch_size)
        extra[METRIC_WEIGHTS] = of_metrics.astype(np.float32)
    return replace(batch, loss_weights=weights.astype(np.float32), extra=extra)
