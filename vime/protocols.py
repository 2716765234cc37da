"""The seams between the stages. A Ray handle and the in-process object satisfy the same protocol.

The loops (vime/loop) are written on these alone; orchestration builds the objects and passes them in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vime.types import (
    Group,
    Metrics,
    PolicyVersion,
    RolloutResult,
    RoutedRows,
    Sample,
    SamplingSupport,
    TrainBatch,
    VersionSpan,
)
from vime.wire import BucketMessage

if TYPE_CHECKING:
    from torch import Tensor

    from vime.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Log-probs come back under the same temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def is_narrow(self) -> bool:
        """Whether top-p, top-k or min-p leave only a part of the vocabulary to sample from."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Tokens in. One request may ask for a whole group (`sampling.n`)."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    session_id: str | None = None
    """Requests of one session go to one engine, so that its prefix cache helps."""
    routed_experts_start: int | None = 0
    """Where engines report the experts they used: the first token whose experts are wanted; None: of no token."""
    wants_support: bool = True
    """Where the run's engines report them: the tokens that top-p, top-k or min-p left to sample from."""
    batch: tuple[str, int, int] | None = None
    """(name, samples, place) of a fixed batch, scheduled when all of it is there, sent once alone: --deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens out: one sampled continuation."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """One per token, natural log, processed at the sampling temperature."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    weight_versions: tuple[VersionSpan, ...]
    """Spans relative to the first token here."""
    support: SamplingSupport | None = None
    """Of each token, what could have been sampled in its place; None: the whole vocabulary, or it was not wanted."""
    routed_experts: RoutedRows | None = None
    """Of the request's tokens and these; None where the engine reports none, or none were wanted."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Greedy continuations with their log-probs, for the trainer to re-score after a weight sync."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[Completion, ...]


TrainerPart: TypeAlias = Literal["weights", "state"]
"""What of a trainer leaves its device: the policy's weights; or gradients, optimizer state and critic."""
TRAINER_PARTS: tuple[TrainerPart, ...] = ("weights", "state")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """How full a device is, in bytes."""

    used: int
    total: int


class Trainer(Protocol):
    """The policy under training. Its methods are collective over all its ranks."""

    def log_probs(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """[T] log-probs of each token under the current policy; NaN at each sample's first token."""

    def values(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """[T] the critic's value of the state before each token; NaN at each sample's first token. PPO alone."""

    def train(self, batch: TrainBatch) -> Metrics:
        """Old and reference log-probs where needed, loss, and one optimizer step per plan in `batch.steps`."""

    def weights(self, version: PolicyVersion) -> Iterator[BucketMessage]:
        """All weights under their HF names, bucket by bucket.

        While engines load a bucket the next may be asked for; the one after that only when they have it."""

    def call_off_weights(self) -> None:
        """An engine failed: those that wait for a bucket are told to give up."""

    def weight_names(self) -> list[str]:
        """Every HF name that `weights` sends, in order."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """For each token sequence, [tokens] log-probs of its tokens at temperature 1; NaN for the first."""

    def save(self, path: Path) -> None:
        """Write model, optimizer, scheduler and random state under `path`."""

    def begin_save(self, path: Path) -> None:
        """`save` in the background: what is trained from now on is not in it. `end_save` comes before another."""

    def end_save(self, wait: bool) -> bool:
        """Whether the checkpoint begun is whole; only then has `path` its name. Raises: TrainingError if it fails."""

    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""

    def export_hf(self, path: Path) -> None:
        """Write an HF checkpoint (config, tokenizer, safetensors) under `path`."""

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Leave the device with these parts (colocate), and free what is cached there; none: the cache alone."""

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Come back to the device with these parts. Raises: TrainingError if it has no room."""

    def device_memory(self) -> DeviceUse | None:
        """Of the fullest rank's device, all processes there counted; None where there is no device but the host."""


class Engines(Protocol):
    """All engines as a rollout function sees them: one place to send requests to."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`sampling.n` completions. Raises: EngineError."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; they answer with what they have, finish_reason "abort"."""

    async def aclose(self) -> None:
        """Close the running event loop's connections; a rollout function that runs its own loop ends with this."""


class Engine(Protocol):
    """One inference engine's control side. Calls go straight to it, never through the router."""

    def pause(self, mode: str = "keep") -> None:
        """Stop scheduling. mode: keep (requests are frozen), wait (until they end), abort (partial answers)."""

    def resume(self) -> None:
        """Schedule again. Raises: WeightSyncError if the engine's weights may not be used."""

    def sleep(self, level: int = 1) -> None:
        """Free the device, and stop scheduling. level 1: weights go to host memory; 2: they are lost."""

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Take device memory again: all, or "weights", or then "kv_cache", with which scheduling goes on."""

    def begin_weights(self, version: PolicyVersion, transport: str, names: Sequence[str]) -> None:
        """Open a weight sync: what will come, by which transport, and the names to be loaded exactly once."""

    def receive(self, bucket: BucketMessage) -> None:
        """Load one bucket. Raises: WeightSyncError naming the tensors whose checksum differs."""

    def commit(self, version: PolicyVersion) -> Metrics:
        """Close the sync: every name loaded once, prefix cache reset, version stamped. Raises: WeightSyncError.

        Returns: the seconds that its slowest worker spent in this sync to "read", "check" and "load" all buckets."""

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        """Greedy continuations of a few fixed prompts."""

    def mark_unfit(self, reason: str) -> None:
        """Pause, and refuse to resume until a weight sync has ended well."""

    def health(self) -> bool: ...


class Roster(Protocol):
    """Which of a run's engines are there, where those that fail are started again; engines by their number."""

    def present(self) -> list[int]:
        """Those that may be called. Raises: what ends the run."""

    def lost(self, number: int, error: BaseException) -> bool:
        """An engine failed in a call. Returns: whether it is started again for it, and the others are to go on."""

    def wait_whole(self) -> None:
        """Until all engines that can come back are there. Raises: what ends the run."""


class Turns(Protocol):
    """Who has the devices that trainer and engines share; the order is drawn in vime/loop/turns.py."""

    def to_training(self, *, weights_follow: bool) -> None:
        """The trainer may train and save. Args: weights_follow: a sync comes before engines generate again."""

    def to_sync(self) -> None:
        """Weights may be sent."""

    def to_generation(self) -> None:
        """Engines may generate."""

    def scoring(self) -> AbstractContextManager[None]:
        """While engines may generate: the trainer may compute log-probs inside."""

    def take_metrics(self) -> Metrics:
        """What it took since the last call."""


class BucketWriter(Protocol):
    """The trainer's end of a transport: puts one bucket's bytes where the engines can read them."""

    def write(
        self, outlines: Sequence[tuple[str, Any]], contents: Iterable[Any], version: PolicyVersion, index: int
    ) -> BucketMessage:
        """Lay out a bucket over the one before the previous, which all engines have. Index 0 begins a sync.

        Args:
            outlines: [(HF name, torch tensor)], for dtype and shape alone; they may be on torch's "meta" device.
            contents: the tensors, in that order, each made when it is asked for.
        """

    def call_off(self) -> None:
        """An engine failed while it should have read a bucket: readers that wait for it are told."""

    def close(self) -> None: ...


class BucketReader(Protocol):
    """The engine's end of a transport, inside the engine's worker process."""

    def read(self, bucket: BucketMessage, device: Any) -> Any:
        """[bytes] uint8 torch tensor of the bucket on `device` (a torch device); the caller's own to keep."""

    def end_sync(self) -> None:
        """The last bucket of a sync was loaded, or the sync was given up."""

    def close(self) -> None: ...


class DataSource(Protocol):
    """The data buffer as the rollout sees it. Derive from it to inherit the methods that do nothing."""

    def get_groups(self, n: int) -> list[Group]:
        """n groups of pending samples with their prompt tokens; those put back come first."""

    def put_back(self, groups: Sequence[Group]) -> None:
        """Return unfinished groups, to be handed out again."""

    def state(self) -> dict[str, Any]:
        """JSON-ready; what `restore` needs to continue exactly here."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken. Raises: DataError if it belongs to other data."""

    def epoch_size(self) -> int | None:
        """Prompts in one epoch; None for a stream (which Python's `len` could not say)."""

    def begin_rollout(self, config: RolloutContext, rollout_id: int) -> None:
        """Called before the rollout function, each time."""
        return None

    def finished(self, group: Group) -> None:
        """A rollout function says that this group of get_groups is generated and rewarded; for the run's journal."""
        return None

    def dropped(self, groups: Sequence[Group], reason: str) -> None:
        """A rollout function says that nobody will train on these groups of get_groups; for the run's journal."""
        return None

    def metrics(self) -> Metrics:
        """What to log after each rollout: names that docs/metrics.md has, or `custom/<name>`."""
        return {}


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What user hooks receive as `config`: the resolved settings, and the live handles they may need."""

    config: Config
    engines: Engines
    tokenizer: Any
    """A transformers tokenizer: encode for prompts, decode for rewards; never to re-tokenise a response."""
    reward: RewardFunction = field(repr=False)
    """Scores a sample as the run is configured; never raises for a bad response."""


@dataclass(frozen=True, slots=True)
class TrainerContext:
    """What users' functions inside the trainer receive as `config`: they run on every rank, far from the engines."""

    config: Config
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a custom loss function sees of a micro-batch: the P tokens under mask 1 that this rank has, [P] each."""

    log_probs: Tensor
    """Under the current policy, at the sampling temperature; the gradient flows through them."""
    entropy: Tensor
    """Of the current policy's distribution; differentiable."""
    old_log_probs: Tensor
    """Before the first step on this rollout; where an earlier version sampled it, as that one sampled."""
    rollout_log_probs: Tensor
    """As the engine sampled them."""
    ref_log_probs: Tensor | None
    """Under the reference model, where the run has one."""
    advantages: Tensor
    """With --use-opd less the KL to the teacher."""
    weights: Tensor
    """What makes a plain sum the mean over trajectories of their token means, over the constant global batch."""
    tokens: Tensor
    """The token ids, int64."""
    samples: Tensor
    """The index in the batch of each token's sample, int64."""
    extra: Mapping[str, Tensor]
    """Further columns of the batch, those with an entry per sample spread over its tokens."""

    def sum_of_sample_mean(self, values: Tensor) -> Tensor:
        """The reduction of the default loss: [P] -> a scalar, this micro-batch's summand."""
        return (self.weights * values).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """What a custom function of importance weights sees of a micro-batch: the P tokens under mask 1 that this rank has.

    Every rank calls the function, ranks without tokens too, because `sequence_mean` and `sequence_sum` ask all of them
    where sequences are cut over ranks.
    """

    old_log_probs: Tensor
    """[P] the trainer's, before the first step on this rollout; no gradient."""
    rollout_log_probs: Tensor
    """[P] as the engine sampled them."""
    pg_loss: Tensor
    """[P] the policy loss of each token, without weights; no gradient."""
    advantages: Tensor
    """[P]"""
    weights: Tensor
    """[P] what makes a plain sum the mean over trajectories of their token means, over the constant global batch."""
    samples: Tensor
    """[P] the index in the batch of each token's sample, int64."""
    sequence_mean: Callable[[Tensor], Tensor]
    """[P] -> [P]: for each token the mean over its whole sample."""
    sequence_sum: Callable[[Tensor], Tensor]
    """[P] -> [P]: the sum."""

    def sum_of_sample_mean(self, values: Tensor) -> Tensor:
        """The reduction of the default loss: [P] -> a scalar, this micro-batch's summand; for metrics."""
        return (self.weights * values).sum()


RolloutFunction: TypeAlias = Callable[..., RolloutResult]
"""(config: RolloutContext, rollout_id: int, data_source, engines, evaluation: bool = False) -> RolloutResult"""
GenerateFunction: TypeAlias = Callable[[RolloutContext, Sample, SamplingParams], Awaitable["Sample | list[Sample]"]]
RewardFunction: TypeAlias = Callable[[RolloutContext, Sample], Awaitable["float | dict[str, float]"]]
