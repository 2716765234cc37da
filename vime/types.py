"""The data that travels between the stages: Sample, Group, RolloutResult, TrainBatch.

Shapes: B samples, T packed tokens (the sum of the samples' lengths), R response tokens of one sample.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vime.batch_columns import *  # noqa: F403 - their names belong to TrainBatch
from vime.routed import RoutedExperts as RoutedExperts
from vime.routed import RoutedRows as RoutedRows
from vime.routed import joined_rows
from vime.support import SamplingSupport as SamplingSupport

Metrics: TypeAlias = dict[str, float]
PolicyVersion: TypeAlias = int  # +1 per published weight set; 0 is what the engines were started with
Message: TypeAlias = dict[str, Any]


class SampleStatus(StrEnum):
    """Where a sample's generation stands."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # ended by itself: end-of-sequence or a stop string
    TRUNCATED = "truncated"  # cut by a length limit
    ABORTED = "aborted"  # stopped from outside; may be continued
    FAILED = "failed"  # cannot be used; `metadata["error"]` says why


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by policy `version`."""

    version: PolicyVersion
    start: int
    end: int


_MAX_TOKEN = 2**31 - 1  # columns are int32

# Fields that have one entry per response token, or count them; only `append_response` may change them.
_INTEGER = frozenset({int})  # and no bool, whose type is another
_ALIGNED = frozenset(
    "tokens response_length loss_mask rollout_log_probs support routed_experts weight_versions supervised".split()
)


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trajectory, or one piece of it: a prompt, a response, and all that training needs to know of them.

    The aligned fields are immutable tuples: `append_response` is their one mutator, so none of them can be out of
    step with the tokens. Everything else may be set freely by hooks and rewards.
    """

    prompt: str | list[Message] = ""
    """What the user's file held; never tokenised again after `tokens` was made."""
    tokens: tuple[int, ...] = ()
    """Prompt ids, then response ids."""
    response_length: int = 0
    """Number of response ids at the end of `tokens` (R)."""
    response: str = ""
    """The response as text, for rewards; training never reads it."""
    loss_mask: tuple[int, ...] = ()
    """R entries: 1 where the policy sampled the token and it gets gradient, 0 for tool or environment tokens."""
    rollout_log_probs: tuple[float, ...] = ()
    """R entries, natural log, of what the engine sampled from; NaN where nobody sampled it: mask 0, or supervised."""
    supervised: bool = False
    """The response is a given answer to imitate (SFT): its trainable tokens were not sampled, so a policy loss is an
    error on this sample."""
    support: SamplingSupport | None = field(default=None, compare=False)  # arrays are neither equal nor not
    """R entries: the tokens that could have been sampled in the place of each, where top-p, top-k or min-p left a part;
    None: all of the vocabulary could."""
    routed_experts: npt.NDArray[Any] | None = field(default=None, compare=False)
    """[n, layers, top_k] uint8 or uint16: the experts that the engine used for each of the first n tokens, when it
    first reported them; read-only. None: of no token are they known."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Which policy version sampled which response tokens; spans are ordered and do not overlap."""
    reward: float | dict[str, float] | None = None
    teacher_log_probs: list[float] | None = None
    """R entries: what the teacher of on-policy distillation gives the response's tokens; None until it was asked."""
    remove_sample: bool = False
    """Keep the sample in group statistics and in every average, but learn from none of its tokens."""
    status: SampleStatus = SampleStatus.PENDING
    group_id: int = -1
    sample_id: int = -1
    trajectory_id: int = -1
    """Siblings split from one episode share it and count once in the loss and in group statistics."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)
    """Spans of this sample's life: {"name", "start_s", "end_s"} in Unix seconds, and details; hooks add theirs by
    `vime.observability.trace.span`."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        try:
            # Numbers of numpy and torch become Python's, which JSON takes; a token 3.7 must not become 3.
            # A tuple of integers stays the one it is: the samples of a group share their prompt's.
            if type(self.tokens) is not tuple or not _INTEGER.issuperset(map(type, self.tokens)):
                put(self, "tokens", tuple(map(operator.index, self.tokens)))
            put(self, "loss_mask", tuple(self.loss_mask))
            put(self, "rollout_log_probs", tuple(map(float, self.rollout_log_probs)))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"tokens must be whole numbers and log-probs numbers: {error}") from error
        put(self, "weight_versions", tuple(self.weight_versions))
        if self.routed_experts is not None:
            rows = np.asarray(self.routed_experts).view()
            rows.flags.writeable = False  # copies of a sample share them
            put(self, "routed_experts", rows)
        self._check()

    def __setattr__(self, name: str, value: Any) -> None:
        # Slots are unset while __init__ runs; afterwards the aligned fields are closed.
        if name in _ALIGNED and hasattr(self, "trace"):
            raise AttributeError(f"Sample.{name} is aligned with the tokens; use append_response")
        object.__setattr__(self, name, value)

    def __copy__(self) -> Sample:
        # copy.copy would set each field by the check above, which takes ten times as long.
        copied = object.__new__(type(self))
        for name in _FIELDS:
            object.__setattr__(copied, name, getattr(self, name))
        return copied

    def _check(self) -> None:
        r = self.response_length
        if not 0 <= r <= len(self.tokens):
            raise ValueError(f"response_length is {r}, but the sample has {len(self.tokens)} tokens")
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) <= _MAX_TOKEN:
            raise ValueError(
                f"token ids lie between {min(self.tokens)} and {max(self.tokens)}; 0 to {_MAX_TOKEN} are possible"
            )
        for name, values in (("loss_mask", self.loss_mask), ("rollout_log_probs", self.rollout_log_probs)):
            if len(values) != r:
                raise ValueError(f"{name} has {len(values)} entries for {r} response tokens")
        if bad := set(self.loss_mask) - {0, 1}:
            raise ValueError(f"loss_mask holds {sorted(bad)}; only 0 and 1 mean something")
        for t, (m, lp) in enumerate(zip(self.loss_mask, self.rollout_log_probs, strict=True)):
            if self.supervised and not math.isnan(lp):
                raise ValueError(f"response token {t} of a supervised sample has log-prob {lp}; nobody sampled it")
            if m and not self.supervised and not (math.isfinite(lp) and lp <= 1e-4):
                raise ValueError(f"response token {t} is trainable but its rollout log-prob is {lp}")
        if self.support is not None:
            self.support.check(self.response_tokens, self.loss_mask)
        end = 0
        for span in self.weight_versions:
            if not end <= span.start < span.end <= r:
                raise ValueError(f"weight_versions span {span} overlaps another or leaves the {r} response tokens")
            end = span.end
        if (rows := self.routed_experts) is None:
            return
        if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"routed_experts has shape {rows.shape} and dtype {rows.dtype}, expected [tokens, layers, top_k] of "
                "uint8 or uint16"
            )
        if len(rows) > max(len(self.tokens) - 1, 0):
            raise ValueError(f"routed_experts has {len(rows)} rows for {len(self.tokens)} tokens (one less at most)")

    @property
    def num_routed(self) -> int:
        """Tokens, from the first on, whose experts are known: where a request's `routed_experts_start` may be."""
        return 0 if self.routed_experts is None else len(self.routed_experts)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The ids before the response."""
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def response_tokens(self) -> tuple[int, ...]:
        """The ids of the response."""
        return self.tokens[len(self.tokens) - self.response_length :]

    def append_response(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        *,
        trainable: bool = True,
        supervised: bool = False,
        version: PolicyVersion | Iterable[VersionSpan] | None = None,
        support: SamplingSupport | None = None,
        routed_experts: RoutedRows | None = None,
    ) -> None:
        """Append response tokens; the one way to lengthen a sample.

        Args:
            token_ids: the new ids.
            log_probs: one per id, as the engine sampled them; required when `trainable`, refused otherwise.
            trainable: False for tokens that a tool or environment wrote (loss_mask 0).
            supervised: the tokens are a given answer to be imitated: no log-probs, and the sample is marked for good;
                sampled and supervised tokens never share a sample.
            version: the policy version that sampled them, or spans relative to the first new token.
            support: what could have been sampled in the place of each new token, as a completion has it; None: all.
            routed_experts: of the sample's tokens with the new ones, up to the last but one, as a completion has them.
                Rows of tokens that have one already are not looked at: it is that of the policy that sampled them.
        Raises: ValueError if a length is off, rows are of other tokens or leave a gap, or a trainable token has no
            finite log-prob or is not in its support. The sample is then unchanged.
        """
        n, r = len(token_ids), self.response_length
        if supervised and (log_probs is not None or not trainable):
            raise ValueError("supervised tokens are trainable and have no log-probs; nobody sampled them")
        if supervised != self.supervised and (1 in self.loss_mask or self.supervised) and trainable:
            raise ValueError("sampled and supervised tokens cannot share a sample")
        if trainable and not supervised and (log_probs is None or len(log_probs) != n):
            got = "none" if log_probs is None else str(len(log_probs))
            raise ValueError(f"{n} trainable tokens need {n} log-probs, got {got}")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that nobody sampled have no log-probs; pass none with trainable=False")
        if isinstance(version, int):
            version = (VersionSpan(version, 0, n),) if n else ()
        new = Sample(
            tokens=(*self.tokens, *token_ids),
            response_length=r + n,
            loss_mask=(*self.loss_mask, *([int(trainable)] * n)),
            rollout_log_probs=(*self.rollout_log_probs, *(log_probs if log_probs is not None else [math.nan] * n)),
            weight_versions=(
                *self.weight_versions,
                *(VersionSpan(s.version, s.start + r, s.end + r) for s in version or ()),
            ),
            support=SamplingSupport.joined([(r, self.support), (n, support)]),
            routed_experts=joined_rows(self.routed_experts, routed_experts, len(self.tokens) + n),
            supervised=self.supervised or supervised,
        )
        for name in _ALIGNED:
            object.__setattr__(self, name, getattr(new, name))
        self.teacher_log_probs = None  # it has not seen the new tokens

    def mask_response(self, start: int = 0, stop: int | None = None) -> None:
        """Take the gradient from response tokens [start, stop): their mask becomes 0; tokens and log-probs stay."""
        hidden = set(range(*slice(start, stop).indices(self.response_length)))
        mask = tuple(0 if i in hidden else m for i, m in enumerate(self.loss_mask))
        object.__setattr__(self, "loss_mask", mask)


_FIELDS = tuple(each.name for each in fields(Sample))


@dataclass(slots=True)
class Group:
    """The samples of one prompt, explicit: never a stride, never a position."""

    group_id: int
    samples: list[Sample]
    place: tuple[int, int] | None = field(default=None, compare=False)
    """(epoch, index): which prompt of the data it is; None where the data source does not say."""
    is_finished: bool = False
    """Handed out with its responses and rewards, of before the run was resumed: it is not generated again."""

    def __post_init__(self) -> None:
        if wrong := [s.sample_id for s in self.samples if s.group_id != self.group_id]:
            raise ValueError(f"group {self.group_id} holds samples of other groups: sample_id {wrong}")


@dataclass(slots=True)
class RolloutResult:
    """What a rollout function returns: finished groups in a reproducible order, and its metrics."""

    groups: list[Group]
    metrics: Metrics = field(default_factory=dict)


# One optimizer step: [dp_rank][micro_batch] -> sample indices into the batch. Every rank has as many micro-batches.
StepPlan: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A rollout as columns, ready to pack. Token columns are ragged: sample i owns [cu_seqlens[i], cu_seqlens[i+1]).

    Token columns are aligned with the token they speak of, so position 0 of each sample (which nothing predicts) and
    the prompt carry mask 0.
    """

    rollout_id: int
    tokens: npt.NDArray[np.int32]
    """[T]"""
    cu_seqlens: npt.NDArray[np.int64]
    """[B + 1]"""
    loss_mask: npt.NDArray[np.uint8]
    """[T] 1 where the token gets gradient."""
    rollout_log_probs: npt.NDArray[np.float32]
    """[T] NaN where the mask is 0, and everywhere in a batch of supervised samples."""
    loss_weights: npt.NDArray[np.float32]
    """[T] what each token's loss is multiplied with before the plain sum over the optimizer step (algo/reduce.py)."""
    advantages: npt.NDArray[np.float32]
    """[B] one per sample, spread over its tokens by the trainer."""
    rewards: npt.NDArray[np.float32]
    """[B] raw."""
    group_ids: npt.NDArray[np.int64]
    """[B]"""
    trajectory_ids: npt.NDArray[np.int64]
    """[B]"""
    steps: tuple[StepPlan, ...]
    """One plan per optimizer step."""
    global_batch_size: int
    """Trajectories per optimizer step: the constant the loss is averaged over."""
    truncated: npt.NDArray[np.bool_]
    """[B] the response was cut by a length limit."""
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further columns by name, [B] or [T]."""
    is_older: bool = False
    """An earlier version of the policy than the trainer's sampled all tokens under mask 1, with --fully-async some;
    then the old log-probs are `rollout_log_probs`."""
    routed_experts: RoutedExperts | None = None
    """What --use-rollout-routing-replay has the trainer replay; None: experts are chosen by the trainer's router."""
    support: SamplingSupport | None = None
    """[T] what the engine could have sampled; log-probs and entropies are over it. None: over the whole vocabulary."""

    def __post_init__(self) -> None:
        b, t = len(self.cu_seqlens) - 1, int(self.cu_seqlens[-1])
        for name in ("tokens", "loss_mask", "rollout_log_probs", "loss_weights"):
            if getattr(self, name).shape != (t,):
                raise ValueError(f"TrainBatch.{name} has shape {getattr(self, name).shape}, expected ({t},)")
        for name in ("advantages", "rewards", "group_ids", "trajectory_ids", "truncated"):
            if getattr(self, name).shape != (b,):
                raise ValueError(f"TrainBatch.{name} has shape {getattr(self, name).shape}, expected ({b},)")
        if (routed := self.routed_experts) is not None:
            if routed.known.shape != (b,):
                raise ValueError(f"TrainBatch.routed_experts is of {len(routed.known)} samples, expected {b}")
            for i in np.flatnonzero(routed.known > self.lengths)[:1]:
                raise ValueError(f"sample {i} has {self.lengths[i]} tokens, but routed experts of {routed.known[i]}")
        if self.support is not None:
            self.support.check(self.tokens, self.loss_mask)
        for k, step in enumerate(self.steps):
            counts = {len(rank) for rank in step}
            if len(counts) != 1:
                raise ValueError(f"step {k}: dp ranks have different numbers of micro-batches: {sorted(counts)}")
        planned = sorted(i for step in self.steps for rank in step for micro in rank for i in micro)
        if planned != list(range(b)):
            raise ValueError(f"the plan covers {len(planned)} of {b} samples, or some twice")

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[B] tokens of each sample."""
        return np.diff(self.cu_seqlens)
