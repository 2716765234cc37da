"""How a training rank trains the policy on a rollout, in the parts between which a critic does its own.

    begin         old and reference log-probs where something needs them, a teacher's
    advantages    made of the critic's values, or of rewards less a KL; the users' functions
    finish        one optimizer step per plan in the batch, and what is logged of the rollout

T tokens of a batch. Every method is collective over the policy's ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vime.config import Config
from vime.models import ModelSettings
from vime.observability.trace import SpanLog
from vime.trainer.critic_columns import Values
from vime.trainer.megatron import forward, parallel, speed, train_step
from vime.trainer.megatron.batches import packing
from vime.trainer.megatron.batches.packing import Layout
from vime.trainer.megatron.batches.routing_replay import RolloutRouting
from vime.trainer.megatron.losses import correction, kl_in_reward, micro_loss
from vime.trainer.megatron.losses.agreement import agreement_metrics
from vime.trainer.megatron.losses.ppo import Ppo
from vime.trainer.megatron.nn.model import Policy
from vime.trainer.megatron.user_hooks import TrainerHooks, advantage_metrics
from vime.trainer.megatron.weights.other_policies import OtherPolicies
from vime.types import Metrics, TrainBatch

LogProbs: TypeAlias = Callable[..., npt.NDArray[np.float32]]
"""(batch, wanted [T], prefix for users' hooks, *, routing) -> [T] log-probs under the weights that the policy has."""


@dataclass(slots=True)
class _Rollout:
    """One between the calls."""

    batch: TrainBatch
    routing: RolloutRouting
    trains_policy: bool
    old: npt.NDArray[np.float32] | None = None
    reference: npt.NDArray[np.float32] | None = None
    metrics: Metrics = field(default_factory=dict)


class RolloutTraining:
    """One per trainer. Order of calls for each rollout: `begin`, `advantages`, `finish`.

    Args:
        policy, model, layout: what is trained, its settings, and how its micro-batches are laid out.
        others: a reference, a teacher, older policies.
        ppo: where advantages are made of a critic's values.
        log_probs: of the policy as it is.
        routing: makes what is known of a batch's experts.
        spans: for the trace.
        world_size: training ranks.
        peak_tflops: what one device could do at most; None where nobody knows.
        device_type: "cpu" or "cuda".
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        model: ModelSettings,
        layout: Layout,
        *,
        others: OtherPolicies,
        hooks: TrainerHooks,
        ppo: Ppo | None,
        log_probs: LogProbs,
        routing: Callable[[TrainBatch], RolloutRouting],
        spans: SpanLog,
        world_size: int,
        peak_tflops: float | None,
        device_type: str,
    ) -> None:
        self._config, self._policy, self._model, self._layout = config, policy, model, layout
        self._others, self._hooks, self._ppo, self._spans = others, hooks, ppo, spans
        self._log_probs, self._routing = log_probs, routing
        self._world_size, self._peak_tflops, self._device_type = world_size, peak_tflops, device_type
        self._rollout: _Rollout | None = None
        self.step = 0
        """Optimizer steps so far."""

    @property
    def _now(self) -> _Rollout:
        assert self._rollout is not None, "a rollout begins with `begin`"
        return self._rollout

    @property
    def batch(self) -> TrainBatch:
        """As far as it is made: with a teacher's log-probs after `begin`, with all columns after `advantages`."""
        return self._now.batch

    @property
    def metrics(self) -> Metrics:
        """Of the rollout that was begun; `finish` gives them with its own."""
        return self._now.metrics

    def timed(self, part: str) -> AbstractContextManager[None]:
        """A part's seconds into the metrics and the trace."""
        return speed.timed(self._now.metrics, self._spans, part)

    def begin(self, batch: TrainBatch) -> None:
        """Compute what advantages and losses need to know of this policy and others, before anything is trained.

        Raises: TrainingError if a token id is not in the vocabulary.
        """
        forward.check_tokens(batch, self._model)
        algo, mask = self._config.algo, batch.loss_mask.astype(np.bool_)
        trains_policy = self._ppo is None or self._ppo.trains_policy(batch)
        now = self._rollout = _Rollout(batch, self._routing(batch), trains_policy)
        reads_old = self._kl_in_reward or self._hooks.reads_old_log_probs or not trains_policy or algo.removes_tokens
        if self._is_policy_loss and (len(batch.steps) > 1 or reads_old):
            with self.timed("log_probs"):
                now.old = self._log_probs(batch, mask, routing=now.routing.old_policy())
        log_probs = partial(self._log_probs, batch)
        if self._others.reference is not None:
            with self.timed("ref_log_probs"), self._others.reference.in_place():
                now.reference = log_probs(mask, "ref_")
        now.batch = self._others.with_teacher(batch, mask, log_probs, self.timed)

    def advantages(self, values: Values | None) -> None:
        """Make the columns that are trained on. Args: values: the critic's, where the run has one."""
        now = self._now
        if self._ppo is not None:
            assert values is not None, "advantages are made of a critic's values"
            now.batch, metrics = self._ppo.with_advantages(now.batch, values, now.old, now.reference)
            now.metrics |= metrics
        elif self._kl_in_reward:
            assert now.old is not None and now.reference is not None, "--kl-coef needs both"
            now.batch, metrics = kl_in_reward.with_advantages(now.batch, now.old, now.reference, self._config.algo)
            now.metrics |= metrics | advantage_metrics(now.batch)
        now.batch, own = self._hooks.prepare(now.batch, old_log_probs=now.old, ref_log_probs=now.reference)
        now.metrics |= own

    def finish(self) -> Metrics:
        """Train the policy, unless the critic alone is trained on this rollout; the rollout's metrics.

        Raises: TrainingError naming rank, rollout and step if a loss or gradient is not finite.
        """
        now, batch = self._now, self._now.batch
        self._rollout = None
        mask, metrics = batch.loss_mask.astype(np.bool_), now.metrics
        if now.trains_policy:
            metrics = self._trained(now, mask) | metrics
        metrics |= self._others.trained(batch.rollout_id) | now.routing.metrics()
        if now.old is not None and self._is_policy_loss:
            metrics |= agreement_metrics(batch, mask, now.old, now.reference)
        counts = {"step": self.step, "tokens": len(batch.tokens), "global_batch_size": batch.global_batch_size}
        metrics |= {f"train/{name}": float(count) for name, count in counts.items()}
        metrics |= speed.speed_metrics(
            metrics, batch, self._model, num_devices=self._world_size, peak_tflops=self._peak_tflops
        )
        return metrics | speed.memory_metrics(self._device_type)

    @property
    def _is_policy_loss(self) -> bool:
        return self._config.algo.loss_type != "sft_loss"

    @property
    def _kl_in_reward(self) -> bool:
        return self._is_policy_loss and self._config.algo.kl_coef != 0

    def _trained(self, now: _Rollout, mask: npt.NDArray[np.bool_]) -> Metrics:
        """All optimizer steps of a rollout. Returns: means over them."""
        batch, algo = now.batch, self._config.algo
        timed = partial(speed.timed, now.metrics, self._spans)
        # The old policy is the one that sampled.
        of_sampler = partial(self._log_probs, batch, routing=now.routing.sampler())
        first = self._others.log_probs_of_sampler(batch, mask, now.old, of_sampler, timed, now.metrics)
        learnt, columns = batch, micro_loss.Columns.of(batch, first, now.reference, algo)
        if self._is_policy_loss and algo.removes_tokens:
            assert first is not None, "what is rejected must be known before the first step"
            learnt, of_correction = correction.without_rejected(batch, first, self._config)
            now.metrics |= of_correction
        with timed("actor_train"):
            results = [self._step(learnt, k, columns, now.routing) for k in range(len(batch.steps))]
            self._policy.finish_param_gather()
        if now.old is None and self._is_policy_loss:
            now.old = forward.share(results[0].log_probs.cpu().numpy(), results[0].wanted, mask)
        return train_step.result_metrics(results)

    def _step(
        self, batch: TrainBatch, k: int, columns: micro_loss.Columns, routing: RolloutRouting
    ) -> train_step.StepResult:
        if self._hooks.before_step is not None:
            self._policy.finish_param_gather()
        self._hooks.before_train_step(batch.rollout_id, k, self._policy)
        plan = forward.filled_up(batch.steps[k][parallel.dp_rank()], self._layout.group)
        mask, temperature = batch.loss_mask.astype(np.bool_), self._config.rollout.rollout_temperature
        pack = partial(packing.pack, layout=self._layout, temperature=temperature, support=batch.support)
        told = routing.training()
        micro_batches = (pack(batch.tokens, batch.cu_seqlens, samples, mask, routing=told) for samples in plan)
        with self._spans.span(f"optimizer step {self.step}", micro_batches=len(plan)):
            result = train_step.train_step(
                self._policy,
                micro_batches,
                len(plan),
                batch,
                columns,
                self._config.algo,
                functions=micro_loss.OwnFunctions(
                    self._hooks.own_loss if self._hooks.loss is not None else None,
                    self._hooks.own_correction if self._hooks.correction is not None else None,
                ),
                where=f"rollout {batch.rollout_id}, step {self.step} (number {k} of this rollout)",
            )
        self.step += 1
        return result
