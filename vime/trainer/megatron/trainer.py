"""The policy under training, on megatron-core: what `vime.protocols.Trainer` asks for, on each of its ranks.

T tokens of a batch, B samples. Every method is collective: all ranks call it with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.config import Config
from vime.config.estimators import needs_critic
from vime.models import family_of
from vime.observability.trace import Span, SpanLog
from vime.platform.base import Platform
from vime.protocols import TRAINER_PARTS, BucketWriter, DeviceUse, TrainerPart
from vime.trainer.megatron import (
    correction,
    cpu_shims,
    fixes,
    forward,
    hf_io,
    kl_in_reward,
    micro_loss,
    model,
    offload,
    outgoing,
    packing,
    parallel,
    ppo,
    profiling,
    settings,
    shards,
    speed,
    train_step,
)
from vime.trainer.megatron.agreement import agreement_metrics
from vime.trainer.megatron.critic import Critic
from vime.trainer.megatron.layout import align_matmuls, layout_of
from vime.trainer.megatron.other_policies import OtherPolicies
from vime.trainer.megatron.routed_layers import routers_of
from vime.trainer.megatron.routing_replay import Bools, RolloutRouting, RoutingPass
from vime.trainer.megatron.trainer_checkpoints import TrainerCheckpoints
from vime.trainer.megatron.user_hooks import TrainerHooks, advantage_metrics
from vime.types import Metrics, PolicyVersion, TrainBatch
from vime.wire import BucketMessage


class MegatronTrainer:
    """One rank. Built on all ranks at the same time; `close` before another is built in the same process.

    Args:
        config: the run's settings.
        hf_path: folder of the HF checkpoint to start from.
        platform: decides device and collective backend.
        rank, world_size: as torch.distributed.init_process_group takes them.
        init_method: where the ranks find each other: as torch.distributed takes it, or a store.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        writer: this rank's end of the weight transport; None where it sends no weights.
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
        writer: BucketWriter | None,
    ) -> None:
        if platform.device_type == "cpu":
            cpu_shims.install()
        fixes.apply()
        if config.train.aligned:
            align_matmuls(platform.device_type)
        self._config, self._platform, self._rank, self._writer = config, platform, rank, writer
        self._world_size, self._spans = world_size, SpanLog()
        self._source = Path(hf_path)
        hf = hf_io.read_config(self._source)
        family = family_of(hf)
        self._model = family.settings(hf)
        self._names = family.name_map(self._model)
        self._settings = settings.megatron_settings(
            self._model, config.megatron, device_type=platform.device_type, world_size=world_size
        )
        if platform.device_type == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        self._profiler = profiling.Profiler(
            config.debug, Path(config.log.run_dir), rank=rank, device_type=platform.device_type
        )
        parallel.start(
            backend=platform.collective_backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout_minutes=config.train.distributed_timeout_minutes,
            seed=config.train.seed,
            sizes=self._settings.sizes,
            virtual_stages=self._settings.transformer.virtual_pipeline_model_parallel_size,
        )
        self._peak_tflops = platform.peak_tflops(str(self._settings.dtype).removeprefix("torch."))
        try:
            self._hooks = TrainerHooks.load(config, rank=rank, world_size=world_size)
            self._hooks.start()
            self._build(total_steps)
        except BaseException:
            parallel.stop()
            raise
        self._step = 0

    def _build(self, total_steps: int) -> None:
        train = self._config.train
        chunks, self._forward = model.build_chunks(self._settings, self._new_chunk)
        hf_io.load_hf(chunks, self._source, self._names, self._model)
        self._homes = shards.homes(chunks, self._names, self._model)
        for chunk in chunks:
            chunk.entropy_grad = self._config.algo.entropy_coef != 0 or self._hooks.loss is not None
        self._routers = routers_of(chunks, self._settings)
        self._routing = partial(RolloutRouting, self._routers, records=train.use_routing_replay)
        self._policy = model.build_policy(chunks, self._forward, self._settings, train, total_steps=total_steps)
        self._others = OtherPolicies(self._config, self._source, chunks, self._model, self._names, self._settings.dtype)
        self._layout = layout_of(self._model, self._settings, self._platform.device_type, aligned=train.aligned)
        self._ppo: ppo.Ppo | None = None
        if needs_critic(self._config.algo):
            of_policy = (self._source, self._model, self._names, self._settings.sizes, self._layout)
            device_type = self._platform.device_type
            self._ppo = ppo.Ppo(self._config, Critic(self._config, *of_policy, device_type, total_steps=total_steps))
        self._parts = offload.DeviceParts(self._policy, self._platform.device_type, critic=self._critic_model)
        self._checkpoints = TrainerCheckpoints(self._config.checkpoint, self._policy, self._critic_model, self._others)

    def _new_chunk(self, chunk: int) -> model.PolicyModel:
        chunk_size = self._config.train.log_probs_chunk_size
        usual = partial(model.PolicyModel, self._model, self._settings, chunk_size=chunk_size, chunk=chunk)
        return self._hooks.build(chunk, usual)

    # Log-probs

    def log_probs(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """[T] log-probs of each token at the sampling temperature; NaN at each first token."""
        return self._batch_log_probs(batch, _all_but_first(batch), routing=self._routing(batch).old_policy())

    def score(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs of whole sequences at temperature 1: one [length] array each, NaN first. For the weight probe."""
        return forward.score(self._forward, sequences, layout=self._layout)

    def _batch_log_probs(
        self, batch: TrainBatch, wanted: Bools, store_prefix: str = "", *, routing: RoutingPass | None = None
    ) -> npt.NDArray[np.float32]:
        """[T] on every rank, each computing its own micro-batches; NaN where not wanted."""
        self._hooks.before_log_probs(self._forward, store_prefix)
        limit = self._config.train.log_probs_max_tokens_per_gpu
        mine = forward.micro_batches_without_gradients(batch, self._model, self._settings.sizes, limit=limit)
        return forward.shared_log_probs(
            self._forward,
            batch.tokens,
            batch.cu_seqlens,
            mine,
            wanted,
            layout=self._layout,
            temperature=self._config.rollout.rollout_temperature,
            support=batch.support,
            routing=routing,
        )

    def values(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """[T] the critic's value of the state before each token; NaN at each first token.

        Raises: ValueError without a critic (--advantage-estimator ppo).
        """
        if self._ppo is None:
            raise ValueError("this trainer has no critic; it has one with --advantage-estimator ppo")
        return self._ppo.critic.values(batch, _all_but_first(batch), np.zeros(batch.num_samples, np.bool_)).of_tokens

    # Training

    def train(self, batch: TrainBatch) -> Metrics:
        """Old and reference log-probs where needed, loss, and one optimizer step per plan in `batch.steps`.

        Returns: means over the optimizer steps, each weighted by loss_weights inside a step, and the mismatch with the
            engine before the first of them.
        Raises: TrainingError naming rank, rollout and step if a loss or gradient is not finite, or a token id is not
            in the vocabulary.
        """
        with self._profiler.rollout(batch.rollout_id):
            return self._train(batch)

    def _train(self, batch: TrainBatch) -> Metrics:
        metrics: Metrics = {}
        timed = partial(speed.timed, metrics, self._spans)
        forward.check_tokens(batch, self._model)
        algo, mask = self._config.algo, batch.loss_mask.astype(np.bool_)
        policy_loss = algo.loss_type != "sft_loss"
        trains_policy = self._ppo is None or self._ppo.trains_policy(batch)
        old, reference, routing = None, None, self._routing(batch)
        in_reward = policy_loss and algo.kl_coef != 0
        reads_old = in_reward or self._hooks.reads_old_log_probs or not trains_policy or algo.removes_tokens
        if policy_loss and (len(batch.steps) > 1 or reads_old):
            with timed("log_probs"):
                old = self._batch_log_probs(batch, mask, routing=routing.old_policy())
        others, log_probs = self._others, partial(self._batch_log_probs, batch)
        if others.reference is not None:
            with timed("ref_log_probs"), others.reference.in_place():
                reference = log_probs(mask, "ref_")
        batch = others.with_teacher(batch, mask, log_probs, timed)
        if self._ppo is not None:
            with timed("values"):
                batch, of_values = self._ppo.with_advantages(batch, old, reference)
            metrics |= of_values
        elif in_reward:
            assert old is not None and reference is not None, "--kl-coef needs both"
            batch, metrics_of_kl = kl_in_reward.with_advantages(batch, old, reference, algo)
            metrics |= metrics_of_kl | advantage_metrics(batch)
        batch, own = self._hooks.prepare(batch, old_log_probs=old, ref_log_probs=reference)
        metrics |= own
        mask = batch.loss_mask.astype(np.bool_)
        if self._ppo is not None:
            with timed("critic_train"):
                metrics |= self._ppo.critic.train(batch, mask)
        if trains_policy:
            # The old policy is the one that sampled.
            of_sampler = partial(log_probs, routing=routing.sampler())
            first = others.log_probs_of_sampler(batch, mask, old, of_sampler, timed, metrics)
            learnt, columns = batch, micro_loss.Columns.of(batch, first, reference, algo)
            if policy_loss and algo.removes_tokens:
                assert first is not None, "what is rejected must be known before the first step"
                learnt, of_correction = correction.without_rejected(batch, first, self._config)
                metrics |= of_correction
            with timed("actor_train"):
                results = [self._train_step(learnt, k, columns, routing) for k in range(len(batch.steps))]
                self._policy.finish_param_gather()
            if old is None and policy_loss:
                old = forward.share(results[0].log_probs.cpu().numpy(), results[0].wanted, mask)
            metrics = train_step.result_metrics(results) | metrics
        metrics |= self._others.trained(batch.rollout_id) | routing.metrics()
        if old is not None and policy_loss:
            metrics |= agreement_metrics(batch, mask, old, reference)
        counts = {"step": self._step, "tokens": len(batch.tokens), "global_batch_size": batch.global_batch_size}
        metrics |= {f"train/{name}": float(count) for name, count in counts.items()}
        world_size, peak = self._world_size, self._peak_tflops
        metrics |= speed.speed_metrics(metrics, batch, self._model, num_devices=world_size, peak_tflops=peak)
        return metrics | speed.memory_metrics(self._platform.device_type)

    def take_spans(self) -> list[Span]:
        """What this rank was busy with since the last call; for the trace."""
        return self._spans.take()

    def _train_step(
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
        with self._spans.span(f"optimizer step {self._step}", micro_batches=len(plan)):
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
                where=f"rollout {batch.rollout_id}, step {self._step} (number {k} of this rollout)",
            )
        self._step += 1
        return result

    # Weights

    def weights(self, version: PolicyVersion) -> Iterator[BucketMessage | None]:
        """All weights by HF name, in buckets of --update-weight-buffer-size; None on ranks that do not write.

        A bucket is valid until the next but one is asked for. All ranks must iterate to the end.
        """
        self._others.published(version)
        outlines, limit = shards.outlines(self._names, self._homes), self._config.sync.update_weight_buffer_size
        return outgoing.send_buckets(self._writer, outlines, self._hf_tensors(), limit, version)

    def call_off_weights(self) -> None:
        """An engine failed in a pass over the weights, which ends early: readers that wait are told."""
        if self._writer is not None:
            self._writer.call_off()

    def weight_names(self) -> list[str]:
        """Every HF name that `weights` sends, in order."""
        return self._names.hf_names()

    def export_hf(self, path: Path) -> None:
        """Write an HF checkpoint (config, tokenizer, safetensors) under `path`."""
        outgoing.export_hf(self._hf_tensors(), self._names, self._source, Path(path), dtype=self._settings.dtype)

    def _hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return shards.hf_tensors(self._policy.chunks, self._names, self._model, self._homes)

    @property
    def _critic_model(self) -> model.Policy | None:
        return None if self._ppo is None else self._ppo.critic.trained

    @property
    def _trained(self) -> list[model.Policy]:
        """All that has an optimizer."""
        return [self._policy, *([] if (critic := self._critic_model) is None else [critic])]

    # Checkpoints and the device

    def save(self, path: Path) -> None:
        """Write model, optimizer, scheduler, random state and step counter under `path`."""
        self._checkpoints.begin(Path(path), step=self._step, in_background=False)
        self.end_save(wait=True)

    def begin_save(self, path: Path) -> None:
        """`save` in the background: what is trained from now on is not in it; `end_save` follows."""
        self._checkpoints.begin(Path(path), step=self._step, in_background=True)

    def end_save(self, wait: bool) -> bool:
        """Whether the checkpoint that was begun is whole now. Args: wait: until it is.

        Raises: TrainingError naming the ranks that could not write, and why.
        """
        return self._checkpoints.end(wait)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; with --finetune the weights alone, and the counter stays 0.

        Raises: ConfigError if `path` is no checkpoint of this model.
        """
        self._step = self._checkpoints.load(Path(path))

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Leave the device with these parts (colocate); on the CPU platform nothing moves."""
        if self._platform.device_type != "cpu":
            self._parts.offload(parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Come back to the device with these parts. Raises: TrainingError if it has no room."""
        self._parts.onload(parts)

    def device_memory(self) -> DeviceUse | None:
        """Of this rank's device, all processes there counted; None on the CPU platform."""
        return speed.device_memory(self._platform.device_type)

    def close(self) -> None:
        """Leave the process groups and release the writer's place; the trainer cannot be used afterwards."""
        self._checkpoints.close()
        if self._writer is not None:
            self._writer.close()
        self._parts.close()
        self._others.close()
        for trained in self._trained:
            trained.release()
        parallel.stop()


def _all_but_first(batch: TrainBatch) -> Bools:
    """[T] all tokens that something predicts."""
    wanted = np.ones(len(batch.tokens), dtype=np.bool_)
    wanted[batch.cu_seqlens[:-1]] = False
    return wanted
