"""How the training ranks divide the work: sizes of the parallel dimensions, and which divisions are possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Ranks along each dimension; what is left over is data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False

    @property
    def model(self) -> int:
        """Ranks that work on one micro-batch together."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        """Data-parallel ranks of `world_size`. Raises: ConfigError if they do not come out even."""
        if problems := list(self.problems(world_size, {})):
            raise ConfigError(problems)
        return world_size // self.model

    def problems(self, world_size: int, shape: Mapping[str, Any]) -> Iterator[str]:
        """What stands against this division, in sentences.

        Args:
            world_size: training ranks.
            shape: the model's TransformerConfig fields; empty when they are not known.
        """
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--pipeline-model-parallel-size": self.pipeline,
            "--context-parallel-size": self.context,
        }
        if wrong := [f"{flag} is {size}; at least 1 is needed" for flag, size in sizes.items() if size < 1]:
            yield from wrong
            return
        if world_size % self.model:
            named = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
            yield (
                f"{named} makes {self.model} ranks that work together, which does not divide the {world_size} training "
                f"ranks (--actor-num-nodes x --actor-num-gpus-per-node); use a multiple of {self.model}"
            )
        if self.sequence_parallel and self.tensor == 1:
            yield "--sequence-parallel splits over the tensor-parallel ranks; give --tensor-model-parallel-size, too"
        for name, meaning in (
            ("num_attention_heads", "attention heads"),
            ("num_query_groups", "key-value heads"),
            ("ffn_hidden_size", "intermediate columns"),
        ):
            if shape.get(name, 0) % self.tensor:
                yield (
                    f"--tensor-model-parallel-size is {self.tensor}, which does not divide the model's "
                    f"{shape[name]} {meaning}"
                )
        if shape.get("num_layers", 0) % self.pipeline:
            yield (
                f"--pipeline-model-parallel-size is {self.pipeline}, which does not divide the model's "
                f"{shape['num_layers']} layers"
            )


def parallel_sizes(megatron: Mapping[str, Any]) -> ParallelSizes:
    """The sizes that Megatron's flags ask for. Args: megatron: settings by field name."""

    def size(name: str) -> int:
        given = megatron.get(name)
        return 1 if given is None else int(given)

    return ParallelSizes(
        tensor=size("tensor_model_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        context=size("context_parallel_size"),
        sequence_parallel=bool(megatron.get("sequence_parallel")),
    )
