"""A checkpoint in Megatron on one process, forward alone: what the trainer says of given tokens, and how."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from vime.config import Config
from vime.config.stages import FIELDS
from vime.errors import TrainingError
from vime.models import family_of
from vime.platform.base import Platform
from vime.support import SamplingSupport
from vime.trainer.megatron import forward, parallel, process, settings
from vime.trainer.megatron.batches.layout import layout_of
from vime.trainer.megatron.batches.routing_replay import RoutingPass, Tally
from vime.trainer.megatron.nn import model
from vime.trainer.megatron.nn.routed_layers import routers_of
from vime.trainer.megatron.weights import hf_io
from vime.types import RoutedExperts

_OF_SEVERAL_RANKS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    *FIELDS,
)
_MAX_TOKENS = 8192


class Scorer:
    """The trainer's model without gradients or optimizer. Build one at a time in a process, and `close` it.

    Args:
        config: a run's; how its ranks divide the work is left out, how micro-batches are filled is not.
        folder: the HF checkpoint whose weights are scored.
        platform: decides the device.
    Raises: ConfigError for a checkpoint or setting that cannot be trained.
    """

    def __init__(self, config: Config, folder: Path, platform: Platform) -> None:
        process.prepare(config, platform, rank=0)
        hf = hf_io.read_config(folder)
        family = family_of(hf)
        self._model, self._config = family.settings(hf), config
        alone = {name: value for name, value in config.megatron.items() if name not in _OF_SEVERAL_RANKS}
        self._settings = settings.megatron_settings(
            self._model, {"lr": 1e-6} | alone, device_type=platform.device_type, world_size=1
        )
        self._meeting = tempfile.TemporaryDirectory(prefix="vime_scorer_")
        meeting = f"file://{self._meeting.name}/rendezvous"
        process.join(config, platform, self._settings, rank=0, world_size=1, init_method=meeting)
        try:
            self._chunks, self._wrapped = model.build_chunks(self._settings, self._build)
            hf_io.load_hf(self._chunks, folder, family.name_map(self._model), self._model)
            for module in self._wrapped:
                module.requires_grad_(False).eval()
            self._layout = layout_of(self._model, self._settings, platform.device_type)
            self._routers = routers_of(self._chunks, self._settings)
            self._device = next(self._chunks[0].parameters()).device
        except BaseException:
            self.close()
            raise

    def _build(self, chunk: int) -> model.PolicyModel:
        chunk_size = self._config.train.log_probs_chunk_size
        return model.PolicyModel(self._model, self._settings, chunk_size=chunk_size, chunk=chunk)

    def log_probs(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        supports: Sequence[SamplingSupport | None] | None = None,
        routed_experts: RoutedExperts | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """One [length] array for each sequence, NaN first; packed as the run packs micro-batches.

        Args:
            supports: what each sequence's tokens were sampled from, and are normalised over; None: the vocabulary.
            routed_experts: of the sequences' tokens; these are used where they are known, as a run with R3 does.
        Raises: TrainingError if they are not of this model.
        """
        lengths = np.array([len(s) for s in sequences], np.int64)
        cu = np.concatenate([[0], np.cumsum(lengths)])
        wanted = np.ones(cu[-1], np.bool_)
        wanted[cu[:-1]] = False
        routing = None if routed_experts is None else self._replayed(routed_experts)
        support = None
        if supports is not None:
            support = SamplingSupport.joined([(int(n), one) for n, one in zip(lengths, supports, strict=True)])
        out = forward.shared_log_probs(
            self._wrapped,
            np.concatenate([np.asarray(s, np.int32) for s in sequences]),
            cu,
            list(self._micro_batches(lengths.tolist())),
            wanted,
            layout=self._layout,
            temperature=temperature,
            support=support,
            routing=routing,
        )
        if routing is not None and routing.tally is not None and (broken := int(routing.tally.repeated)):
            raise TrainingError(f"routed experts of {broken} tokens name an expert twice, which no router does")
        return [out[cu[i] : cu[i + 1]] for i in range(len(sequences))]

    def _replayed(self, routed_experts: RoutedExperts) -> RoutingPass:
        """Raises: TrainingError if the rows are of another shape than the model."""
        routers = self._routers
        shape = (routers.num_layers, routers.top_k if routers.num_experts else 0)
        if routed_experts.rows.shape[1:] != shape:
            raise TrainingError(
                f"samples have routed experts of {routed_experts.rows.shape[1:]} (layers, experts a token), but the "
                f"model's are {shape}; did this model sample them?"
            )
        return RoutingPass(routers, self._device, routed_experts, tally=Tally(routers, self._device))

    def _micro_batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        train = self._config.train
        limit = train.max_tokens_per_gpu if train.use_dynamic_batch_size else None
        micro: list[int] = []
        for i, length in enumerate(lengths):
            full = sum(lengths[j] for j in micro) + length > (limit or _MAX_TOKENS)
            if micro and (full or (not train.use_dynamic_batch_size and len(micro) == train.micro_batch_size)):
                yield micro
                micro = []
            micro.append(i)
        yield micro

    def inside(
        self, sequence: Sequence[int], routed_experts: RoutedExperts | None = None
    ) -> tuple[list[Tensor], Mapping[int, Tensor]]:
        """What goes on in one sequence of n tokens.

        Args: routed_experts: as for `log_probs`.
        Returns: hidden states [n, hidden], float32 on the CPU: the embedding's, then each layer's; and of each layer
            with experts (counted from 0) the experts chosen, [n, experts] bool.
        """
        states: list[Tensor] = []
        routed: dict[int, Tensor] = {}
        (chunk,) = self._chunks
        with _hooks() as add:
            add(chunk.embedding, lambda output: states.append(_rows(output)))
            for number, layer in enumerate(chunk.decoder.layers):
                add(layer, lambda output: states.append(_rows(output[0])))
                for router in (m for m in layer.modules() if isinstance(m, TopKRouter)):
                    add(router, lambda output, n=number: routed.update({n: output[1].detach().cpu()}))
            self.log_probs([sequence], routed_experts=routed_experts)
        return states, routed

    def close(self) -> None:
        """Let go of the model and of the process group."""
        self._chunks, self._wrapped = [], []
        parallel.stop()
        self._meeting.cleanup()


def _rows(output: Tensor) -> Tensor:
    """[n, 1, hidden] as [n, hidden] on the CPU."""
    return output.detach()[:, 0].float().cpu()


@contextmanager
def _hooks() -> Iterator[Any]:
    """A function (module, of its output) -> None, whose hooks are gone when the block ends."""
    handles = []

    def add(module: torch.nn.Module, see: Any) -> None:
        handles.append(module.register_forward_hook(lambda _module, _inputs, output: see(output)))

    try:
        yield add
    finally:
        for handle in handles:
            handle.remove()
