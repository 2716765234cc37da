"""A teacher of another architecture than the policy's: a model of its own, on the host between forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.config import Config
from vime.errors import ConfigError
from vime.models import ModelSettings, family_of
from vime.models.stored import vocabulary_problem
from vime.trainer.megatron import forward, parallel
from vime.trainer.megatron.batches.layout import layout_of
from vime.trainer.megatron.nn import model
from vime.trainer.megatron.optimizers.offload import Offloader, parameters_and_buffers
from vime.trainer.megatron.settings import megatron_settings
from vime.trainer.megatron.weights import hf_io
from vime.types import TrainBatch

_FLAG = "--opd-teacher-load"
_PART = "teacher"
_OF_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")


class OwnTeacher:
    """Of one rank; built on all ranks at the same time, divided over them as the policy is.

    Args:
        folder: its HF checkpoint.
        policy: settings of the policy, whose vocabulary it must have.
        dtype: that the run computes in.
        device_type: "cpu", where nothing moves, or "cuda".
    Raises: ConfigError if it has another vocabulary, or cannot be divided over the ranks.
    """

    def __init__(
        self, config: Config, folder: Path, policy: ModelSettings, dtype: torch.dtype, *, device_type: str
    ) -> None:
        self._config, self._device_type = config, device_type
        family = family_of(hf := hf_io.read_config(folder))
        self._model = family.settings(hf)
        if problem := vocabulary_problem(folder, self._model, policy, flag=_FLAG):
            raise ConfigError(problem)
        overrides = _overrides(config.megatron, self._model, dtype)
        try:
            self._settings = megatron_settings(
                self._model, overrides, device_type=device_type, world_size=parallel.world_size()
            )
        except ConfigError as error:
            raise ConfigError([f"{_FLAG} {folder}: {problem}" for problem in error.problems]) from error
        self._layout = layout_of(self._model, self._settings, device_type)
        build = partial(model.PolicyModel, self._model, self._settings, chunk_size=config.train.log_probs_chunk_size)
        self._chunks, self._forward = model.build_chunks(self._settings, lambda chunk: build(chunk=chunk))
        hf_io.load_hf(self._chunks, folder, family.name_map(self._model), self._model)
        for chunk in self._chunks:
            chunk.requires_grad_(False)
        self._offloader = Offloader()
        self._leave()

    def log_probs(self, batch: TrainBatch, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
        """[T] on every rank, of the tempered distributions as the policy's; NaN where not wanted. Collective."""
        limit = self._config.train.log_probs_max_tokens_per_gpu
        sizes = self._settings.sizes
        with self._on_device():
            return forward.shared_log_probs(
                self._forward,
                batch.tokens,
                batch.cu_seqlens,
                forward.micro_batches_without_gradients(batch, self._model, sizes, limit=limit),
                wanted,
                layout=self._layout,
                temperature=self._config.rollout.rollout_temperature,
                support=batch.support,
            )

    def close(self) -> None:
        """Give the host memory back."""
        self._offloader.close()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self._offloader.onload(_PART)
        yield
        self._leave()

    def _leave(self) -> None:
        if self._device_type != "cpu":
            self._offloader.offload(_PART, parameters_and_buffers(self._chunks))
            torch.cuda.empty_cache()


def _overrides(megatron: Mapping[str, Any], teacher: ModelSettings, dtype: torch.dtype) -> dict[str, Any]:
    """The run's settings for Megatron, as far as they are of any model on these ranks."""
    overrides = {**megatron, "bf16": dtype == torch.bfloat16}
    if "num_moe_experts" not in teacher.transformer:
        for name in _OF_EXPERTS:
            overrides.pop(name, None)
    return overrides
