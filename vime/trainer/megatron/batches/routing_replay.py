"""Routing replay: the router's choice of experts is replaced by one that was made before.

Either the engine's (`TrainBatch.routed_experts`), so that the trained policy is the one that sampled, or the old
policy's own, recorded in its forward pass. What a micro-batch replays travels with it (`Packed.routing`): its forward
pass and whatever of it is computed again in the backward pass read the same rows, in any order of micro-batches, and
no model sees another's. Gradients still reach the router: probabilities are gathered at the replayed experts.

T tokens that this rank's routers see of a micro-batch, L this rank's layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.errors import TrainingError
from vime.trainer.megatron import parallel
from vime.types import Metrics, RoutedExperts, TrainBatch

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Samples = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routers:
    """What of a model routes tokens on this rank."""

    layers: tuple[int, ...]
    """Numbers of the decoder layers with experts here, counted from 0 over the whole model."""
    num_layers: int
    """Decoder layers of the whole model."""
    num_experts: int
    top_k: int
    shards: int = 1
    """Sequence parallel: tensor-parallel ranks that share out a micro-batch's tokens."""
    shard: int = 0
    free: tuple[int, ...] = ()
    """Decoder layers here whose routers cannot be told what to choose."""

    def __post_init__(self) -> None:
        if self.num_experts > 2**15:  # rows are int16 on the device
            raise ValueError(f"{self.num_experts} experts of a layer cannot be recorded; at most {2**15}")

    @property
    def dtype(self) -> torch.dtype:
        """Of recorded rows."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def mine(self, num_tokens: int) -> slice:
        """Which of the packed tokens this rank's routers see."""
        size = num_tokens // self.shards
        return slice(self.shard * size, (self.shard + 1) * size)


class Tally:
    """How often routers would have chosen other experts than they were given; on the device."""

    def __init__(self, routers: Routers, device: torch.device) -> None:
        self.differing = torch.zeros(len(routers.layers), dtype=torch.int64, device=device)
        """[L] tokens whose own set of experts was another one."""
        self.repeated = torch.zeros((), dtype=torch.int64, device=device)
        """Tokens whose rows name an expert twice, which no router does."""
        self.replayed = 0
        """Tokens that were given experts."""

    def add(self, column: int, own: Tensor, given: Tensor, known: Tensor) -> None:
        """Count a layer's tokens. Args: own, given: [T, k] int64. known: [T, 1] bool, which of them count."""
        others = (given[:, :, None] != own[:, None, :]).all(-1).any(-1)
        self.differing[column] += (others & known[:, 0]).sum()


@dataclass(slots=True)
class MicroRouting:
    """What the routers of one micro-batch are told, all its layers together."""

    columns: Mapping[int, int]
    """Decoder layer -> its place in the rows."""
    experts: Tensor | None = None
    """[T, L, k] uint8 or int16: the experts to replay."""
    known: Tensor | None = None
    """[T, 1] bool: which tokens have experts to replay, the others are routed freely. None: all."""
    record: Tensor | None = None
    """[T, L, k]: where to note the experts that are used."""
    tally: Tally | None = None
    counted: set[int] = field(default_factory=set)
    """Layers that are in the tally; what is computed again is not counted again."""

    def of_layer(self, layer: int) -> LayerRouting:
        """What that layer's router is told."""
        return LayerRouting(self, self.columns[layer])


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Stands where megatron-core's router expects its RouterReplay, whose instances form one global list."""

    micro: MicroRouting
    column: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """([T, k] the chosen experts' scores, differentiable, [T, k] int64 the experts). As megatron-core asks for it.

        Args: scores: [T, experts] by which the router chooses.
        """
        micro, column = self.micro, self.column
        if micro.experts is None:
            values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            chosen = micro.experts[:, column].long()
            if (known := micro.known) is not None:
                _, own = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
                if micro.tally is not None and column not in micro.counted:
                    micro.counted.add(column)
                    micro.tally.add(column, own, chosen, known)
                chosen = torch.where(known, chosen, own)
            values = scores.gather(1, chosen)
        if micro.record is not None:
            micro.record[:, column] = chosen
        return values, chosen


@dataclass(frozen=True, slots=True)
class RoutingPass:
    """What one pass over a rollout replays and records; `packing.pack` asks it for each micro-batch."""

    routers: Routers
    device: torch.device
    engine: RoutedExperts | None = None
    recorded: Mapping[Samples, Tensor] | None = None
    """[T, L, k] on the host, of each micro-batch as it was recorded; goes before the engine's."""
    record_into: MutableMapping[Samples, Tensor] | None = None
    """Where to put the rows that are used, which fill as the pass goes on; on the device."""
    tally: Tally | None = None

    def micro_batch(self, samples: Samples, sample_of: Ints, positions: Ints, real: Bools) -> MicroRouting | None:
        """What the routers of a micro-batch are told; None where they are free.

        Args:
            samples: of the micro-batch.
            sample_of, positions: [packed tokens] each token's sample and its place there.
            real: [packed tokens] False for padding.
        """
        routers = self.routers
        if not routers.layers:
            return None
        mine = routers.mine(len(positions))
        micro = MicroRouting({layer: column for column, layer in enumerate(routers.layers)}, tally=self.tally)
        if self.recorded is not None:
            if samples not in self.recorded:
                raise TrainingError(f"the experts of a micro-batch of samples {samples} were not recorded")
            micro.experts = _to_device(self.recorded[samples], self.device)
        elif self.engine is not None:
            self._take(micro, self.engine, sample_of[mine], positions[mine], real[mine])
        if self.record_into is not None:
            shape = (mine.stop - mine.start, len(routers.layers), routers.top_k)
            micro.record = torch.empty(shape, dtype=routers.dtype, device=self.device)
            self.record_into[samples] = micro.record
        return None if micro.experts is None and micro.record is None else micro

    def _take(self, micro: MicroRouting, engine: RoutedExperts, sample_of: Ints, positions: Ints, real: Bools) -> None:
        """The engine's rows of these tokens into `micro`, where it has some."""
        known = real & (positions < engine.known[sample_of])
        if not known.any():
            return
        first_row = np.cumsum(engine.known) - engine.known
        index = np.where(known, first_row[sample_of] + positions, 0)
        first, last = self.routers.layers[0], self.routers.layers[-1]
        rows = engine.rows[:, first : last + 1][index]
        if rows.shape[1] != len(self.routers.layers):  # dense layers between, or another rank's
            rows = rows[:, [layer - first for layer in self.routers.layers]]
        if (highest := int(rows.max())) >= self.routers.num_experts:
            raise TrainingError(
                f"routed_experts name expert {highest}, but a layer has {self.routers.num_experts}, counted from 0; do "
                "the engines serve this model?"
            )
        micro.experts = _to_device(torch.from_numpy(rows if rows.itemsize == 1 else rows.view(np.int16)), self.device)
        has_rows = _to_device(torch.from_numpy(known), self.device)
        broken = has_rows & _names_one_twice(micro.experts)
        micro.known = (has_rows & ~broken)[:, None]  # free, so that nothing breaks before the error is raised
        if self.tally is not None:
            self.tally.replayed += int(known.sum())
            self.tally.repeated += broken.sum()


class RolloutRouting:
    """What is replayed in the passes over one rollout: first, perhaps, the old policy's forward, then the steps'.

    Args: records: note the experts that the old policy's forward used, and replay these in the steps.
    Raises: TrainingError if the batch's rows are not of this model.
    """

    def __init__(self, routers: Routers, batch: TrainBatch, *, records: bool) -> None:
        self._routers, self._engine, self._records = routers, batch.routed_experts, records
        self._device = torch.device(torch.cuda.current_device())
        self._used: dict[Samples, Tensor] = {}
        self._recorded: dict[Samples, Tensor] | None = None
        self._tally: Tally | None = None
        if self._engine is None and not records:
            return
        if routers.free:
            raise TrainingError(
                f"decoder layers {list(routers.free)} of --custom-model-provider-path's model have experts, but are no "
                "RoutedLayer (vime.trainer.megatron.nn.routed_layers), so that nothing can be replayed there"
            )
        shape = (routers.num_layers, routers.top_k if routers.num_experts else 0)
        if self._engine is not None and self._engine.rows.shape[1:] != shape:
            raise TrainingError(
                f"rollout {batch.rollout_id} has routed experts of {self._engine.rows.shape[1:]} (layers, experts a "
                f"token), but the model's are {shape}; do the engines serve this model?"
            )

    def old_policy(self) -> RoutingPass | None:
        """Of the forward pass before the first step. None: everything is routed freely, and nothing recorded."""
        if self._engine is None and not self._records:
            return None
        used = self._used if self._records else None
        return RoutingPass(self._routers, self._device, self._engine, record_into=used, tally=self._first_tally())

    def sampler(self) -> RoutingPass | None:
        """Of a forward pass under the weights that sampled: the engine's rows, where there are some."""
        return None if self._engine is None else RoutingPass(self._routers, self._device, self._engine)

    def training(self) -> RoutingPass | None:
        """Of an optimizer step."""
        if self._used:
            self._recorded, self._used = _on_host(self._used), {}
        if self._engine is None and self._recorded is None:
            return None
        return RoutingPass(self._routers, self._device, self._engine, self._recorded, tally=self._first_tally())

    def _first_tally(self) -> Tally | None:
        """One for the first pass, before the policy moves."""
        if self._engine is None or self._tally is not None:
            return None
        self._tally = Tally(self._routers, self._device)
        return self._tally

    def metrics(self) -> Metrics:
        """train/routing_replay_differs, of all layers and of each. Collective, where the engine's rows are replayed.

        Raises: TrainingError if a row names an expert twice.
        """
        if (tally := self._tally) is None:
            return {}
        n, layers = self._routers.num_layers, list(self._routers.layers)
        counts = torch.zeros(2 * n + 1, dtype=torch.int64, device=self._device)
        counts[layers] = tally.differing
        counts[[n + layer for layer in layers]] = tally.replayed
        counts[2 * n] = tally.repeated
        *counted, repeated = parallel.sum_over_ranks(counts).tolist()
        if repeated:
            raise TrainingError(
                f"the routed experts of {repeated} tokens name an expert twice in a layer, which no router does: the "
                "engine gave rows that it had not filled"
            )
        shares = {layer: counted[layer] / counted[n + layer] for layer in range(n) if counted[n + layer]}
        if not shares:
            return {}
        name = "train/routing_replay_differs"
        return {name: sum(shares.values()) / len(shares)} | {f"{name}/layer_{i}": s for i, s in shares.items()}


def _names_one_twice(experts: Tensor) -> Tensor:
    """[T] whether a layer's row has an expert in two places. Args: experts: [T, L, k]."""
    found = torch.zeros(len(experts), dtype=torch.bool, device=experts.device)
    for shift in range(1, experts.shape[-1] // 2 + 1):  # all pairs of places
        found |= (experts == experts.roll(shift, -1)).any(-1).any(-1)
    return found


def _to_device(rows: Tensor, device: torch.device) -> Tensor:
    """On CUDA through page-locked memory: a copy from other memory would wait for the work before it."""
    if device.type == "cpu":
        return rows
    return (rows if rows.is_pinned() else rows.pin_memory()).to(device, non_blocking=True)


def _on_host(rows: Mapping[Samples, Tensor]) -> dict[Samples, Tensor]:
    """Copies in host memory, in which they stay until their micro-batch is trained on."""
    device = next(iter(rows.values())).device
    if device.type == "cpu":
        return dict(rows)
    copies = {samples: torch.empty(r.shape, dtype=r.dtype, pin_memory=True) for samples, r in rows.items()}
    for samples, copy in copies.items():
        copy.copy_(rows[samples], non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copies
