"""The plan of a rollout's training: which samples form an optimizer step, and which go into which micro-batch.

Pure: lengths and costs in, indices out. The same input gives the same plan on every machine. `balance` has the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.data.balance import Bin, Loads, best_fit, deal, even_out, spread
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
    costs: Sequence[float] | None = None,
    multiple: int = 1,
    lockstep: bool = False,
) -> tuple[StepPlan, ...]:
    """Cut samples into optimizer steps, and each step into micro-batches of data-parallel ranks.

    A step takes the next `global_batch_size` trajectories in order of first appearance, with all their siblings; the
    last step takes what is left. Inside a step every rank gets the same number of micro-batches, as few as the limit
    allows, and as nearly the same cost as it allows.

    Args:
        lengths: [B] tokens of each sample, prompt and response.
        trajectory_ids: [B] equal for siblings.
        global_batch_size: trajectories per step.
        dp_size: data-parallel ranks.
        max_tokens: limit of tokens in a micro-batch. None: `micro_batch_size` samples at most instead.
        micro_batch_size: samples in a micro-batch; not read when `max_tokens` is given.
        costs: [B] what each sample takes to compute, in any unit, such as FLOPs; attention makes a long sample cost
            more than as many tokens in short ones. None: its tokens.
        multiple: every rank's number of micro-batches is a multiple of this: the number of pipeline stages where
            each rank has several virtual ones.
        lockstep: ranks wait for each other in every micro-batch, as expert-parallel ones do: balance each row of
            micro-batches that run at the same time, rather than the ranks' sums.

    Returns: per step [dp_rank][micro_batch] -> sample indices, ascending. Every sample is in exactly one place. A
        micro-batch is empty only where no plan avoids it: a step with fewer samples than micro-batches, or whose
        samples are too long to share and no multiple of dp_size; it then is among the last of the highest ranks.
    Raises: DataError if a sample is empty or longer than max_tokens, or a step has fewer samples than ranks;
        ValueError on sizes below 1 and on costs that are not positive.
    """
    costs = [float(length) for length in lengths] if costs is None else costs
    sizes = {
        "global_batch_size": global_batch_size,
        "dp_size": dp_size,
        "micro_batch_size": micro_batch_size,
        "multiple": multiple,
    }
    if max_tokens is not None:
        sizes["max_tokens"] = max_tokens
    if wrong := [f"{name} is {value}" for name, value in sizes.items() if value < 1]:
        raise ValueError(f"{', '.join(wrong)}; at least 1 is needed")
    if not len(lengths) == len(trajectory_ids) == len(costs):
        raise ValueError(f"{len(lengths)} lengths for {len(trajectory_ids)} trajectory ids and {len(costs)} costs")
    _check_samples(lengths, costs, max_tokens)
    plans = []
    for k, step in enumerate(_cut_steps(trajectory_ids, global_batch_size)):
        if len(step) < dp_size:
            raise DataError(
                f"optimizer step {k} has {len(step)} samples for {dp_size} data-parallel ranks; every rank needs one: "
                f"use a --global-batch-size of {dp_size} or more that divides the rollout, or fewer ranks"
            )
        order = sorted(step, key=lambda i: (-costs[i], -lengths[i], i))
        loads = Loads([lengths[i] for i in order], [costs[i] for i in order])
        plan = _plan_step(loads, dp_size, max_tokens, micro_batch_size, multiple, lockstep)
        plans.append(tuple(tuple(tuple(sorted(order[j] for j in micro)) for micro in rank) for rank in plan))
    return tuple(plans)


def _check_samples(lengths: Sequence[int], costs: Sequence[float], max_tokens: int | None) -> None:
    for i, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"sample {i} has {length} tokens; a sample to train on has at least one")
        if max_tokens is not None and length > max_tokens:
            raise DataError(
                f"sample {i} has {length} tokens, more than the {max_tokens} of one micro-batch; "
                f"raise --max-tokens-per-gpu to at least {length} or shorten prompts and responses"
            )
    for i, cost in enumerate(costs):
        if not 0 < cost < math.inf:
            raise ValueError(f"sample {i} has the cost {cost}; a finite number above 0 is needed")


def _cut_steps(trajectory_ids: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Sample indices of each step, in order; siblings are in the step of the first of them."""
    position: dict[int, int] = {}
    for t in trajectory_ids:
        position.setdefault(t, len(position))
    steps: list[list[int]] = [[] for _ in range(-(-len(position) // global_batch_size))]
    for i, t in enumerate(trajectory_ids):
        steps[position[t] // global_batch_size].append(i)
    return steps


def _plan_step(
    loads: Loads, dp_size: int, max_tokens: int | None, micro_batch_size: int, multiple: int, lockstep: bool
) -> StepPlan:
    max_samples = micro_batch_size if max_tokens is None else None
    num_samples = len(loads.lengths)
    if max_tokens is None:
        count = dp_size * _round_up(-(-num_samples // (dp_size * micro_batch_size)), multiple)
        bins = spread(range(num_samples), loads, count, max_samples=max_samples)
        assert bins is not None, f"{num_samples} samples do not fit {count} x {micro_batch_size}"
    else:
        bins = _fill(loads, dp_size, max_tokens, multiple)
    # Like costs side by side; empty bins come last.
    bins.sort(key=lambda b: (-b.cost, min(b.samples, default=0)))
    rows = [bins[start : start + dp_size] for start in range(0, len(bins), dp_size)]
    for row in rows:
        even_out([[b] for b in row], loads, max_tokens, max_samples)
    ranks = deal(rows, dp_size)
    if not lockstep:
        even_out(ranks, loads, max_tokens, max_samples)
    return tuple(tuple(tuple(b.samples) for b in rank) for rank in ranks)


def _fill(loads: Loads, dp_size: int, max_tokens: int, multiple: int) -> list[Bin]:
    """Bins within the token limit for all ranks: as few as found, of like cost where that fits."""
    packed = best_fit(loads, max_tokens)
    most = _round_up(-(-len(packed) // dp_size), multiple)
    alone = sum(2 * length > max_tokens for length in loads.lengths)  # no two of them share a bin
    bins_needed = max(alone, -(-sum(loads.lengths) // max_tokens))
    fewest = _round_up(-(-bins_needed // dp_size), multiple)
    for rows in range(fewest, most + 1, multiple):
        if bins := spread(range(len(loads.lengths)), loads, rows * dp_size, max_tokens=max_tokens):
            return bins
    # Only the tight packing fits; bring it to the wanted number of bins by halving the costliest ones.
    while len(packed) < most * dp_size:
        splittable = [b for b in packed if len(b.samples) > 1]
        if not splittable:
            packed.append(Bin())
            continue
        costliest = max(splittable, key=lambda b: b.cost)
        packed.remove(costliest)
        halves = spread(costliest.samples, loads, 2)
        assert halves is not None
        packed.extend(halves)
    return packed


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def step_ids(steps: Sequence[StepPlan], num_samples: int) -> npt.NDArray[np.int64]:
    """[B] the optimizer step that each sample is in, from 0."""
    ids = np.empty(num_samples, np.int64)
    for k, step in enumerate(steps):
        ids[[i for rank in step for micro in rank for i in micro]] = k
    return ids
