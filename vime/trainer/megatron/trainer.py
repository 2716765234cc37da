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
from torch import Tensor

from vime.config import Config
from vime.config.critic_ranks import critic_ranks
from vime.config.estimators import needs_critic
from vime.models import family_of
from vime.observability.trace import Span, SpanLog
from vime.platform.base import Platform
from vime.protocols import TRAINER_PARTS, BucketWriter, DeviceUse, TrainerPart
from vime.trainer.critic_columns import CriticTargets, Values
from vime.trainer.megatron import forward, parallel, process, profiling, settings, speed
from vime.trainer.megatron.batches.layout import layout_of
from vime.trainer.megatron.batches.routing_replay import Bools, RolloutRouting, RoutingPass
from vime.trainer.megatron.checkpoints.trainer_checkpoints import TrainerCheckpoints
from vime.trainer.megatron.critic import Critic, critic_settings
from vime.trainer.megatron.losses.ppo import Ppo, all_but_first, critic_values, targets_of
from vime.trainer.megatron.nn import model
from vime.trainer.megatron.nn.routed_layers import routers_of
from vime.trainer.megatron.optimizers import offload
from vime.trainer.megatron.rollout_training import RolloutTraining
from vime.trainer.megatron.user_hooks import TrainerHooks
from vime.trainer.megatron.weights import hf_io, outgoing, shards
from vime.trainer.megatron.weights.other_policies import OtherPolicies
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
        process.prepare(config, platform, rank)
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
        self._profiler = profiling.Profiler(
            config.debug, Path(config.log.run_dir), rank=rank, device_type=platform.device_type
        )
        process.join(config, platform, self._settings, rank=rank, world_size=world_size, init_method=init_method)
        try:
            self._hooks = TrainerHooks.load(config, rank=rank, world_size=world_size)
            self._hooks.start()
            self._build(total_steps)
        except BaseException:
            parallel.stop()
            raise

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
        device_type = self._platform.device_type
        self._others = OtherPolicies(
            self._config,
            self._source,
            chunks,
            self._model,
            self._names,
            self._settings.dtype,
            device_type=device_type,
        )
        self._layout = layout_of(self._model, self._settings, device_type)
        self._critic = self._build_critic(total_steps)
        self._training = RolloutTraining(
            self._config,
            self._policy,
            self._model,
            self._layout,
            others=self._others,
            hooks=self._hooks,
            ppo=Ppo(self._config) if needs_critic(self._config.algo) else None,
            log_probs=self._batch_log_probs,
            routing=self._routing,
            spans=self._spans,
            world_size=self._world_size,
            peak_tflops=self._platform.peak_tflops(str(self._settings.dtype).removeprefix("torch.")),
            device_type=device_type,
        )
        self._parts = offload.DeviceParts(self._policy, device_type, critic=self._critic_model)
        self._checkpoints = TrainerCheckpoints(self._config.checkpoint, self._policy, self._critic_model, self._others)

    def _build_critic(self, total_steps: int) -> Critic | None:
        """The critic that takes turns with the policy on these ranks; None where there is none, or it has its own."""
        if not needs_critic(self._config.algo) or critic_ranks(self._config) is not None:
            return None
        own = critic_settings(
            self._config, self._model, device_type=self._platform.device_type, world_size=self._world_size
        )
        return Critic(self._config, self._source, self._model, self._names, own, self._layout, total_steps=total_steps)

    def _new_chunk(self, chunk: int) -> model.PolicyModel:
        chunk_size = self._config.train.log_probs_chunk_size
        usual = partial(model.PolicyModel, self._model, self._settings, chunk_size=chunk_size, chunk=chunk)
        return self._hooks.build(chunk, usual)

    # Log-probs

    def log_probs(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """[T] log-probs of each token at the sampling temperature; NaN at each first token."""
        return self._batch_log_probs(batch, all_but_first(batch), routing=self._routing(batch).old_policy())

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
        if self._critic is None:
            raise ValueError("this trainer has no critic; it has one with --advantage-estimator ppo")
        return self._critic.values(batch, all_but_first(batch), np.zeros(batch.num_samples, np.bool_)).of_tokens

    # Training

    def train(self, batch: TrainBatch) -> Metrics:
        """Old and reference log-probs where needed, loss, and one optimizer step per plan in `batch.steps`.

        Returns: means over the optimizer steps, each weighted by loss_weights inside a step, and the mismatch with the
            engine before the first of them.
        Raises: TrainingError naming rank, rollout and step if a loss or gradient is not finite, or a token id is not
            in the vocabulary.
        """
        training, critic = self._training, self._critic
        with self._profiler.rollout(batch.rollout_id):
            training.begin(batch)
            values = None
            if critic is not None:
                with training.timed("values"):
                    values = critic_values(critic, training.batch, self._config.critic)
            training.advantages(values)
            if critic is not None:
                with training.timed("critic_train"):
                    of_critic = critic.train(training.batch, training.batch.loss_mask.astype(np.bool_))
                training.metrics.update(of_critic)
            return training.finish()

    def begin_train(self, batch: TrainBatch) -> None:
        """The first of three parts of `train`, for a critic on ranks of its own, which gives its values meanwhile."""
        self._training.begin(batch)

    def critic_targets(self, values: Values) -> CriticTargets:
        """The second part: advantages, and what the critic is trained on. Args: values: of the batch begun."""
        self._training.advantages(values)
        return targets_of(self._training.batch)

    def end_train(self) -> Metrics:
        """The third part: the optimizer steps, while the critic takes its own. Returns: as `train` does."""
        with self._profiler.rollout(self._training.batch.rollout_id):
            return self._training.finish()

    def take_spans(self) -> list[Span]:
        """What this rank was busy with since the last call; for the trace."""
        return self._spans.take()

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
        return None if self._critic is None else self._critic.trained

    @property
    def _trained(self) -> list[model.Policy]:
        """All that has an optimizer."""
        return [self._policy, *([] if (critic := self._critic_model) is None else [critic])]

    # Checkpoints and the device

    def save(self, path: Path) -> None:
        """Write model, optimizer, scheduler, random state and step counter under `path`."""
        self._checkpoints.begin(Path(path), step=self._training.step, in_background=False)
        self.end_save(wait=True)

    def begin_save(self, path: Path) -> None:
        """`save` in the background: what is trained from now on is not in it; `end_save` follows."""
        self._checkpoints.begin(Path(path), step=self._training.step, in_background=True)

    def end_save(self, wait: bool) -> bool:
        """Whether the checkpoint that was begun is whole now. Args: wait: until it is.

        Raises: TrainingError naming the ranks that could not write, and why.
        """
        return self._checkpoints.end(wait)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; with --finetune the weights alone, and the counter stays 0.

        Raises: ConfigError if `path` is no checkpoint of this model.
        """
        self._training.step = self._checkpoints.load(Path(path))

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
