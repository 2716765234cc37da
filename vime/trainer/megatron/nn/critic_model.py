"""The critic as a Megatron model: the policy's layers, and one number for each token in the place of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from vime.config.hf_weights import read_weights
from vime.models import ModelSettings, NameMap
from vime.models.value_head import STORED, CriticNames, untied
from vime.trainer.megatron.batches.packing import Packed
from vime.trainer.megatron.nn.model import gpt_arguments
from vime.trainer.megatron.nn.rows import take_rows
from vime.trainer.megatron.settings import MegatronSettings
from vime.trainer.megatron.weights import hf_io
from vime.trainer.megatron.weights.safetensors_io import SafetensorsFolder


class ValueHead(torch.nn.Module):
    """[..., D] -> [..., 1] float32; 0 for everything until a checkpoint is read or a step was made.

    Every tensor-parallel rank has it whole, and computes the same.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """In float32 whatever the model's dtype: values are small differences of returns."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


class CriticModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose forward gives the value of the state before each wanted token.

    A stage before the last gives its hidden states, as `PolicyModel`'s does. Embedding and head are never tied.

    Args: chunk: number of this rank's virtual stage.
    """

    def __init__(self, model: ModelSettings, settings: MegatronSettings, *, chunk: int = 0) -> None:
        super().__init__(
            **gpt_arguments(model, settings, chunk),
            share_embeddings_and_output_weights=False,
        )
        if self.post_process:
            # megatron-core's checkpoints expect this name of a last layer.
            self.output_layer = ValueHead(settings.transformer.hidden_size, settings.dtype)

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: Packed, **_: Any) -> tuple[Tensor] | Tensor:
        """([P] float32,) of the micro-batch's wanted tokens."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # All ranks compute the same from the whole sequence, so each keeps its own part of the gradient as it is.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return (self.output_layer(take_rows(hidden_states[:, 0], packed_seq_params.rows))[:, 0],)


@torch.no_grad()
def load_critic(chunks: Sequence[CriticModel], folder: Path, names: NameMap, model: ModelSettings) -> None:
    """Fill this rank's part of a critic from an HF checkpoint: a language model's, or one with a `score` head.

    Without such a head every value is 0 until the first step.

    Args:
        chunks: the rank's, one for each of its pipeline stages, with fresh weights.
        names, model: of the language model.
    Raises: ConfigError naming the tensors that are missing, unexpected or of another shape.
    """
    heads = {chunk: chunk.output_layer for chunk in chunks if chunk.post_process}
    for chunk in heads:
        chunk.output_layer = None  # type: ignore[assignment]  # `load_hf` fills what it finds in the model
    try:
        hf_io.load_hf(chunks, folder, CriticNames(names, model), untied(model))
    finally:
        for chunk, head in heads.items():
            chunk.output_layer = head
    stored = SafetensorsFolder({n: t for n, t in read_weights(folder).items() if n in STORED.values()})
    for head in heads.values():
        for part, name in STORED.items():
            if name in stored.names():
                getattr(head, part).copy_(stored.read(name))
