"""How the training ranks divide the work: sizes of the parallel dimensions, and which divisions are possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.config.stages import Stages, stages_of
from vime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Ranks along each dimension; what is left over is data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    """Ranks that hold different experts of a layer. They and `expert_tensor` divide the tensor-, context- and
    data-parallel ranks of a stage anew, for the experts alone."""
    expert_tensor: int = 1
    """Ranks that hold different parts of each expert."""
    stages: Stages = field(default_factory=Stages)

    @property
    def model(self) -> int:
        """Ranks that work on one micro-batch together."""
        return self.tensor * self.pipeline * self.context

    @property
    def in_lockstep(self) -> bool:
        """Whether data-parallel ranks wait for each other in every micro-batch, as they share out experts.

        Ranks of a stage are cut into runs of equal length, once into those that share a micro-batch and once into those
        that share out experts: only where the latter divides the former does no run of experts cross a boundary.
        """
        return self.tensor * self.context % (self.expert * self.expert_tensor) != 0

    def data(self, world_size: int) -> int:
        """Data-parallel ranks of `world_size`. Raises: ConfigError if they do not come out even."""
        if problems := list(self.problems(world_size, {})):
            raise ConfigError(problems)
        return world_size // self.model

    def problems(self, world_size: int, shape: Mapping[str, Any], *, on_cpu: bool = False) -> Iterator[str]:
        """What stands against this division, in sentences.

        Args:
            world_size: training ranks.
            shape: the model's TransformerConfig fields; empty when they are not known.
            on_cpu: the ranks talk through gloo.
        """
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--pipeline-model-parallel-size": self.pipeline,
            "--context-parallel-size": self.context,
            "--expert-model-parallel-size": self.expert,
            "--expert-tensor-parallel-size": self.expert_tensor,
        }
        if wrong := [f"{flag} is {size}; at least 1 is needed" for flag, size in sizes.items() if size < 1]:
            yield from wrong
            return
        if world_size % self.model:
            named = " x ".join(f"{flag} {size}" for flag, size in list(sizes.items())[:3] if size > 1)
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
        yield from self.stages.problems(shape.get("num_layers"))
        if shape.get("num_moe_experts"):
            yield from self._expert_problems(world_size, shape, on_cpu=on_cpu)
        elif shape:
            for dimension, size, unset in (("model", self.expert, 1), ("tensor", self.expert_tensor, self.tensor)):
                if size != unset:
                    yield f"--expert-{dimension}-parallel-size is {size}, but the model has no experts; leave it out"

    def _expert_problems(self, world_size: int, shape: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
        """What stands against this division of a model with experts."""
        if self.tensor > 1 and not self.sequence_parallel:
            yield (
                f"--tensor-model-parallel-size is {self.tensor} and the model has experts, whose tokens are shared out "
                "over these ranks; add --sequence-parallel"
            )
        if shape["num_moe_experts"] % self.expert:
            yield (
                f"--expert-model-parallel-size is {self.expert}, which does not divide the model's "
                f"{shape['num_moe_experts']} experts"
            )
        if self.expert_tensor not in (1, self.tensor):
            yield (
                f"--expert-tensor-parallel-size is {self.expert_tensor}; it can be 1 or "
                f"--tensor-model-parallel-size, which is {self.tensor}"
            )
        elif shape.get("moe_ffn_hidden_size", 0) % self.expert_tensor:
            yield (
                f"--expert-tensor-parallel-size is {self.expert_tensor}, which does not divide the "
                f"{shape['moe_ffn_hidden_size']} intermediate columns of the model's experts; 1 leaves experts whole"
            )
        if (shape.get("moe_shared_expert_intermediate_size") or 0) % self.tensor:
            yield (
                f"--tensor-model-parallel-size is {self.tensor}, which does not divide the "
                f"{shape['moe_shared_expert_intermediate_size']} intermediate columns of the model's shared experts"
            )
        per_stage, together = world_size // self.pipeline, self.expert * self.expert_tensor
        if world_size % self.model == 0 and per_stage % together:
            yield (
                f"--expert-model-parallel-size {self.expert} x --expert-tensor-parallel-size {self.expert_tensor} "
                f"makes {together} ranks that hold a layer's experts together, which does not divide the {per_stage} "
                "ranks of a pipeline stage"
            )
        if on_cpu and self.expert > 1 and self.expert_tensor > 1:
            yield (
                f"--expert-model-parallel-size {self.expert} with --expert-tensor-parallel-size {self.expert_tensor} "
                "gathers parts of different lengths, which gloo cannot do on the CPU; give "
                "--expert-tensor-parallel-size 1 (its default is --tensor-model-parallel-size)"
            )


def parallel_sizes(megatron: Mapping[str, Any]) -> ParallelSizes:
    """The sizes that Megatron's flags ask for. Args: megatron: settings by field name."""

    def size(name: str) -> int:
        given = megatron.get(name)
        return 1 if given is None else int(given)

    cut_like_the_rest = megatron.get("expert_tensor_parallel_size") is None
    return ParallelSizes(
        tensor=size("tensor_model_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        context=size("context_parallel_size"),
        sequence_parallel=bool(megatron.get("sequence_parallel")),
        expert=size("expert_model_parallel_size"),
        # Megatron's default: experts are cut as everything else is.
        expert_tensor=size("tensor_model_parallel_size" if cut_like_the_rest else "expert_tensor_parallel_size"),
        stages=stages_of(megatron, size("pipeline_model_parallel_size")),
    )
