"""The plan of a rollout's training: which samples form an optimizer step, and which go into which micro-batch.

Pure: lengths in, indices out. The same input gives the same plan on every machine. Times are not modelled; ranks are
balanced by token count.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from vime.errors import DataError
from vime.types import StepPlan


def plan_steps(
    lengths: Sequence[int],
    trajectory_ids: Sequence[int],
    *,
    global_batch_size: int,
    dp_size: int,
    max_tokens: int | None = None,
    micro_batch_size: int = 1,
) -> tuple[StepPlan, ...]:
    """Cut samples into optimizer steps, and each step into micro-batches of data-parallel ranks.

    A step takes the next `global_batch_size` trajectories in order of first appearance, with all their siblings; the
    last step takes what is left. Inside a step every rank gets the same number of micro-batches, as few as the limit
    allows, balanced by tokens.

    Args:
        lengths: [B] tokens of each sample, prompt and response.
        trajectory_ids: [B] equal for siblings.
        global_batch_size: trajectories per step.
        dp_size: data-parallel ranks.
        max_tokens: limit of tokens in a micro-batch. None: `micro_batch_size` samples at most instead.
        micro_batch_size: samples in a micro-batch; not read when `max_tokens` is given.

    Returns: per step [dp_rank][micro_batch] -> sample indices, ascending. Every sample is in exactly one place. A
        micro-batch is empty only where no plan avoids it: a step whose sample count is not a multiple of dp_size and
        whose samples are too long to share; it then is the last of the highest ranks.
    Raises: DataError if a sample is empty or longer than max_tokens, or a step has fewer samples than ranks;
        ValueError on sizes below 1.
    """
    sizes = {"global_batch_size": global_batch_size, "dp_size": dp_size, "micro_batch_size": micro_batch_size}
    if max_tokens is not None:
        sizes["max_tokens"] = max_tokens
    if wrong := [f"{name} is {value}" for name, value in sizes.items() if value < 1]:
        raise ValueError(f"{', '.join(wrong)}; at least 1 is needed")
    if len(lengths) != len(trajectory_ids):
        raise ValueError(f"{len(lengths)} lengths for {len(trajectory_ids)} trajectory ids")
    for i, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"sample {i} has {length} tokens; a sample to train on has at least one")
        if max_tokens is not None and length > max_tokens:
            raise DataError(
                f"sample {i} has {length} tokens, more than the {max_tokens} of one micro-batch; "
                f"raise --max-tokens-per-gpu to at least {length} or shorten prompts and responses"
            )
    plans = []
    for k, step in enumerate(_cut_steps(trajectory_ids, global_batch_size)):
        if len(step) < dp_size:
            raise DataError(
                f"optimizer step {k} has {len(step)} samples for {dp_size} data-parallel ranks; every rank needs one: "
                f"use a --global-batch-size of {dp_size} or more that divides the rollout, or fewer ranks"
            )
        plans.append(_plan_step(step, lengths, dp_size, max_tokens, micro_batch_size))
    return tuple(plans)


def _cut_steps(trajectory_ids: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Sample indices of each step, in order; siblings are in the step of the first of them."""
    position: dict[int, int] = {}
    for t in trajectory_ids:
        position.setdefault(t, len(position))
    steps: list[list[int]] = [[] for _ in range(-(-len(position) // global_batch_size))]
    for i, t in enumerate(trajectory_ids):
        steps[position[t] // global_batch_size].append(i)
    return steps


@dataclass(slots=True)
class _Bin:
    """A micro-batch being filled."""

    tokens: int = 0
    samples: list[int] = field(default_factory=list)

    def add(self, sample: int, length: int) -> None:
        self.samples.append(sample)
        self.tokens += length


def _plan_step(
    step: list[int], lengths: Sequence[int], dp_size: int, max_tokens: int | None, micro_batch_size: int
) -> StepPlan:
    by_length = sorted(step, key=lambda i: (-lengths[i], i))
    if max_tokens is None:
        rows = -(-len(step) // (dp_size * micro_batch_size))
        bins = _spread(by_length, lengths, rows * dp_size, max_samples=micro_batch_size)
        assert bins is not None, f"{len(step)} samples do not fit {rows * dp_size} x {micro_batch_size}"
    else:
        bins = _fill(by_length, lengths, dp_size, max_tokens)
    return _deal(bins, dp_size)


def _fill(by_length: list[int], lengths: Sequence[int], dp_size: int, max_tokens: int) -> list[_Bin]:
    """A multiple of dp_size bins within the token limit: as few as found, spread evenly where that fits."""
    packed = _best_fit(by_length, lengths, max_tokens)
    most = -(-len(packed) // dp_size)
    fewest = -(-sum(lengths[i] for i in by_length) // (max_tokens * dp_size))
    for rows in range(max(fewest, 1), most + 1):
        if bins := _spread(by_length, lengths, rows * dp_size, max_tokens=max_tokens):
            return bins
    # Only the tight packing fits; bring it to the wanted number of bins by halving the fullest ones.
    while len(packed) < most * dp_size:
        splittable = [b for b in packed if len(b.samples) > 1]
        if not splittable:
            packed.append(_Bin())
            continue
        fullest = max(splittable, key=lambda b: b.tokens)
        packed.remove(fullest)
        halves = _spread(fullest.samples, lengths, 2)
        assert halves is not None
        packed.extend(halves)
    return packed


def _spread(
    by_length: list[int],
    lengths: Sequence[int],
    count: int,
    *,
    max_tokens: int | None = None,
    max_samples: int | None = None,
) -> list[_Bin] | None:
    """The longest sample first, each into the emptiest of `count` bins; None if the token limit is overrun."""
    bins = [_Bin() for _ in range(count)]
    heap = [(0, k) for k in range(count)]  # (tokens, bin); already a heap
    for i in by_length:
        tokens, k = heap[0]
        if max_tokens is not None and tokens + lengths[i] > max_tokens:
            return None
        bins[k].add(i, lengths[i])
        if max_samples is not None and len(bins[k].samples) == max_samples:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (bins[k].tokens, k))
    return bins


def _best_fit(by_length: list[int], lengths: Sequence[int], max_tokens: int) -> list[_Bin]:
    """Best-fit decreasing: each sample into the fullest bin with room. At most 11/9 of the fewest bins, plus one."""
    bins: list[_Bin] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in by_length:
        at = bisect.bisect_left(room, (lengths[i], -1))
        left, k = room.pop(at) if at < len(room) else (max_tokens, len(bins))
        if k == len(bins):
            bins.append(_Bin())
        bins[k].add(i, lengths[i])
        bisect.insort(room, (left - lengths[i], k))
    return bins


def _deal(bins: list[_Bin], dp_size: int) -> StepPlan:
    """Bins of like size side by side on the ranks, the largest of a row to the rank with the fewest tokens so far.

    Like sizes run at the same time because ranks wait for each other within a micro-batch, too (expert and pipeline
    parallel); empty bins come last.
    """
    ordered = sorted(bins, key=lambda b: (-b.tokens, min(b.samples, default=0)))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    for start in range(0, len(ordered), dp_size):
        row = ordered[start : start + dp_size]
        # In a row with empty bins the low ranks get the full ones; the order is the rule stated in plan_steps.
        order = sorted(range(dp_size), key=lambda d: (tokens[d], d)) if row[-1].samples else list(range(dp_size))
        for d, b in zip(order, row, strict=True):
            ranks[d].append(tuple(sorted(b.samples)))
            tokens[d] += b.tokens
    return tuple(tuple(rank) for rank in ranks)
