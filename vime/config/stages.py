"""Which decoder layers each pipeline stage holds: as many everywhere, uneven, or interleaved in virtual stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import ConfigError

_UNEVEN = "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout"
_MOST_REPETITIONS = 10_000
FIELDS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Megatron's settings that `stages_of` reads and that the trainer hands on as one layout."""


@dataclass(frozen=True, slots=True)
class Stages:
    """How a model's layers are cut into stages; R pipeline ranks of V virtual stages each, R * V stages in order.

    Stage s is on rank s % R, its number s // R there. The first has the embedding, the last the head.
    """

    ranks: int = 1
    virtual: int | None = None
    """--num-virtual-stages-per-pipeline-rank"""
    layers_each: int | None = None
    """--num-layers-per-virtual-pipeline-stage, the other way to say it."""
    first: int | None = None
    """Layers of the first rank, over its virtual stages."""
    last: int | None = None
    with_embedding: bool = False
    """The embedding counts as a layer."""
    with_loss: bool = False
    layout: str | None = None
    """Every stage spelt out: E embedding, t decoder layer, L head, | between stages; (...)*n and t*n repeat."""
    group: int | None = None
    """Micro-batches that a virtual stage takes in a row; None: as many as there are ranks."""
    overlaps: bool | None = None
    batches: bool | None = None
    """--overlap-p2p-communication and --batch-p2p-comm, where given."""

    @property
    def is_interleaved(self) -> bool:
        """Whether ranks may have more than one stage."""
        if self.layout is not None:
            return len(_expanded(self.layout)) > self.ranks
        return (self.virtual or 1) > 1 or self.layers_each is not None

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of a rank's micro-batches must be a multiple of."""
        return (self.group or self.ranks) if self.is_interleaved else 1

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """[R * V] decoder layers of each stage. Raises: ConfigError if it does not come out."""
        if problems := list(self.problems(num_layers)):
            raise ConfigError(problems)
        if self.layout is not None:
            return tuple(stage.count("t") for stage in _expanded(self.layout))
        per_rank = self._per_rank(num_layers)
        virtual = self._virtual(per_rank)
        stages = [rank // virtual for _ in range(virtual) for rank in per_rank]
        stages[0] -= self.with_embedding
        stages[-1] -= self.with_loss
        return tuple(stages)

    def _per_rank(self, num_layers: int) -> list[int]:
        """[R] layers of each rank, over its virtual stages; embedding and head among them where they count."""
        ends = (self.first, self.last)
        middle = self.ranks - sum(n is not None for n in ends)
        rest = num_layers + self.with_embedding + self.with_loss - sum(n or 0 for n in ends)
        each = rest // middle if middle else 0
        return [n for n in (self.first, *[each] * middle, self.last) if n is not None]

    def _virtual(self, per_rank: list[int]) -> int:
        return max(per_rank) // self.layers_each if self.layers_each else self.virtual or 1

    def problems(self, num_layers: int | None) -> Iterator[str]:
        """What stands against it, in sentences. Args: num_layers: of the model; None where it is not known."""
        if self.ranks < 1:
            yield f"--pipeline-model-parallel-size is {self.ranks}; at least 1 is needed"
            return
        numbers = {
            "--num-virtual-stages-per-pipeline-rank": self.virtual,
            "--num-layers-per-virtual-pipeline-stage": self.layers_each,
            "--decoder-first-pipeline-num-layers": self.first,
            "--decoder-last-pipeline-num-layers": self.last,
            "--microbatch-group-size-per-virtual-pipeline-stage": self.group,
        }
        if wrong := [f"{flag} is {n}; at least 1 is needed" for flag, n in numbers.items() if n is not None and n < 1]:
            yield from wrong
            return
        given = [flag for flag, n in numbers.items() if n is not None]
        given += [
            flag
            for flag, n in {
                "--account-for-embedding-in-pipeline-split": self.with_embedding,
                "--account-for-loss-in-pipeline-split": self.with_loss,
                "--pipeline-model-parallel-layout": self.layout,
            }.items()
            if n
        ]
        if self.ranks == 1 and given:
            yield f"{' and '.join(given)}: layers are on one rank; give --pipeline-model-parallel-size, too"
            return
        yield from self._contradictions(given)
        yield from self._schedule_problems()
        if self.layout is not None:
            yield from self._layout_problems(num_layers)
        elif num_layers is not None:
            yield from self._sum_problems(num_layers)

    def _contradictions(self, given: list[str]) -> Iterator[str]:
        if self.virtual is not None and self.layers_each is not None:
            yield (
                "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage say the same in "
                "two ways; give one"
            )
        if self.layers_each is not None and (self.first or self.last):
            yield (
                "--num-layers-per-virtual-pipeline-stage does not go with stages of unequal length; give "
                "--num-virtual-stages-per-pipeline-rank"
            )
        if (self.first or self.last) and (self.with_embedding or self.with_loss):
            yield f"{' and '.join(given)}: count embedding and loss yourself in the layers of the first or last stage"
        if self.layout is not None and len(given) > 1 + (self.group is not None):
            others = [flag for flag in given if "layout" not in flag and "group" not in flag]
            yield f"--pipeline-model-parallel-layout says everything about the stages; leave out {' and '.join(others)}"

    def _schedule_problems(self) -> Iterator[str]:
        """Of how stages talk to each other."""
        if not self._problems_of_text() and self.is_interleaved:
            if self.overlaps is False or self.batches:
                yield (
                    "virtual stages need --overlap-p2p-communication and --no-batch-p2p-comm, which are then the "
                    "default: megatron-core's batched messages give wrong gradients on two ranks and hang on four"
                )
            if self.group is not None and self.group < self.ranks:
                yield (
                    f"--microbatch-group-size-per-virtual-pipeline-stage is {self.group}, but the {self.ranks} "
                    f"pipeline ranks need at least {self.ranks}, or a stage waits for itself"
                )
            return
        why = "; add --num-virtual-stages-per-pipeline-rank, or leave it out"
        if self.group is not None:
            yield f"--microbatch-group-size-per-virtual-pipeline-stage orders the work of virtual stages{why}"
        if self.overlaps:
            yield f"--overlap-p2p-communication: only virtual stages can overlap their messages{why}"
        if self.batches is False:
            yield f"--no-batch-p2p-comm is for virtual stages, which need it{why}"

    def _problems_of_text(self) -> list[str]:
        if self.layout is None:
            return []
        try:
            stages = _expanded(self.layout)
        except ValueError as error:
            return [f"--pipeline-model-parallel-layout {self.layout}: {error}"]
        if len(stages) % self.ranks:
            return [
                f"--pipeline-model-parallel-layout {self.layout} has {len(stages)} stages, no multiple of "
                f"--pipeline-model-parallel-size {self.ranks}"
            ]
        return []

    def _layout_problems(self, num_layers: int | None) -> Iterator[str]:
        assert self.layout is not None
        if problems := self._problems_of_text():
            yield from problems
            return
        text = "".join(stages := _expanded(self.layout))
        if (
            text.count("E") != 1
            or not stages[0].startswith("E")
            or text.count("L") != 1
            or not stages[-1].endswith("L")
        ):
            yield f"--pipeline-model-parallel-layout {self.layout} must begin with the one E and end with the one L"
        if num_layers is not None and text.count("t") != num_layers:
            yield (
                f"--pipeline-model-parallel-layout {self.layout} has {text.count('t')} decoder layers (t), the model "
                f"{num_layers}"
            )

    def _sum_problems(self, num_layers: int) -> Iterator[str]:
        total = num_layers + self.with_embedding + self.with_loss
        counted = "".join(
            f" + {name}" for name, on in (("embedding", self.with_embedding), ("loss", self.with_loss)) if on
        )
        ends = (self.first, self.last)
        fixed, middle = sum(n or 0 for n in ends), self.ranks - sum(n is not None for n in ends)
        rest = total - fixed
        if not fixed and rest % middle:
            yield (
                f"--pipeline-model-parallel-size is {self.ranks}, which does not divide the model's {num_layers} "
                f"layers{counted}; cut them unevenly with {_UNEVEN}"
            )
            return
        if fixed and (rest % middle or rest < middle if middle else rest):
            yield (
                f"the first and last of {self.ranks} pipeline stages were given {fixed} of the model's {num_layers} "
                f"layers, and the {middle} others cannot share {rest} evenly; change "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
            )
            return
        per_rank = self._per_rank(num_layers)
        virtual = self._virtual(per_rank)
        if virtual < 1 or any(n % virtual for n in per_rank) or (self.layers_each and max(per_rank) % self.layers_each):
            flag = (
                f"--num-layers-per-virtual-pipeline-stage {self.layers_each}"
                if self.layers_each
                else f"--num-virtual-stages-per-pipeline-rank {virtual}"
            )
            held = " and ".join(map(str, sorted(set(per_rank))))
            yield f"{flag} does not divide the {held} layers of a pipeline rank"


def stages_of(megatron: Mapping[str, Any], ranks: int) -> Stages:
    """What Megatron's settings ask for. Args: megatron: by field name. ranks: pipeline ranks."""
    read = megatron.get
    return Stages(
        ranks=ranks,
        virtual=read("virtual_pipeline_model_parallel_size"),
        layers_each=read("num_layers_per_virtual_pipeline_stage"),
        first=read("num_layers_in_first_pipeline_stage"),
        last=read("num_layers_in_last_pipeline_stage"),
        with_embedding=bool(read("account_for_embedding_in_pipeline_split")),
        with_loss=bool(read("account_for_loss_in_pipeline_split")),
        layout=read("pipeline_model_parallel_layout"),
        group=read("microbatch_group_size_per_vp_stage"),
        overlaps=read("overlap_p2p_comm"),
        batches=read("batch_p2p_comm"),
    )


def _expanded(layout: str) -> list[str]:
    """The letters of each stage, as Megatron-LM reads them. Raises: ValueError on other letters, or none at all."""
    text = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([Et|L])\*(\d+)"):
        text = re.sub(pattern, _repeated, text)
    if wrong := sorted(set(text) - set("EtL|")):
        hint = "; the multi-token-prediction layer is not trained" if "m" in wrong else ""
        raise ValueError(f"{' '.join(wrong)} is not understood, only E, t, L, | and repetitions are{hint}")
    return text.split("|")


def _repeated(match: re.Match[str]) -> str:
    if len(match[2]) > len(str(_MOST_REPETITIONS)) or int(match[2]) > _MOST_REPETITIONS:
        raise ValueError(f"{match[0]} repeats too often; {_MOST_REPETITIONS} times are the most")
    return match[1] * int(match[2])
