"""Samples shared out so that every share costs about the same: bins within limits, and rows of bins over ranks.

Costs are what a sample's computation takes, in any unit; floats, added in a fixed order, so that the same input gives
the same answer everywhere.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_ENOUGH = 1.001  # a row's costliest bin over the mean, below which nobody would notice
_GAIN = 0.05  # of the distance between two bins, the least that a change must take away; it ends the search


@dataclass(frozen=True, slots=True)
class Loads:
    """What samples weigh. They are numbered by cost, the most expensive is 0: so equal work gives equal bins."""

    lengths: Sequence[int]
    costs: Sequence[float]


@dataclass(slots=True)
class Bin:
    """A micro-batch being filled."""

    tokens: int = 0
    cost: float = 0.0
    samples: list[int] = field(default_factory=list)

    def add(self, sample: int, loads: Loads) -> None:
        """Put a sample in."""
        self.samples.append(sample)
        self.tokens += loads.lengths[sample]
        self.cost += loads.costs[sample]

    def remove(self, sample: int, loads: Loads) -> None:
        """Take a sample out."""
        self.samples.remove(sample)
        self.tokens -= loads.lengths[sample]
        self.cost -= loads.costs[sample]


def spread(
    samples: Iterable[int], loads: Loads, count: int, *, max_tokens: int | None = None, max_samples: int | None = None
) -> list[Bin] | None:
    """The most expensive sample first, each into the cheapest of `count` bins that has room; None if none has."""
    bins = [Bin() for _ in range(count)]
    heap = [(0.0, k) for k in range(count)]  # (cost, bin); already a heap
    # Bins that were too full for an earlier sample, the emptiest first: (-room, cost, bin). Samples mostly get shorter,
    # so that a bin waits here until one may fit, rather than being looked at for each.
    waiting: list[tuple[int, float, int]] = []
    for i in sorted(samples):
        while waiting and -waiting[0][0] >= loads.lengths[i]:
            _, cost, k = heapq.heappop(waiting)
            heapq.heappush(heap, (cost, k))
        while max_tokens is not None and heap:
            cost, k = heap[0]
            room = max_tokens - bins[k].tokens
            if room >= loads.lengths[i]:
                break
            heapq.heappop(heap)
            heapq.heappush(waiting, (-room, cost, k))
        if not heap:
            return None
        k = heap[0][1]
        bins[k].add(i, loads)
        if max_samples is not None and len(bins[k].samples) == max_samples:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (bins[k].cost, k))
    return bins


def best_fit(loads: Loads, max_tokens: int) -> list[Bin]:
    """Best-fit decreasing: each sample into the fullest bin with room. At most 11/9 of the fewest bins, plus one."""
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in sorted(range(len(loads.lengths)), key=lambda i: (-loads.lengths[i], i)):
        at = bisect.bisect_left(room, (loads.lengths[i], -1))
        left, k = room.pop(at) if at < len(room) else (max_tokens, len(bins))
        if k == len(bins):
            bins.append(Bin())
        bins[k].add(i, loads)
        bisect.insort(room, (left - loads.lengths[i], k))
    return bins


def even_out(shares: Sequence[Sequence[Bin]], loads: Loads, max_tokens: int | None, max_samples: int | None) -> None:
    """Make the costliest share cheaper while it can give a bin of another share a sample, or swap one with it.

    Args: shares: each a list of bins; the k-th bins of two shares exchange samples. No bin is emptied.
    """
    costs = [sum(b.cost for b in share) for share in shares]
    enough = _ENOUGH * sum(costs) / len(costs)
    while True:
        *others, high = sorted(range(len(shares)), key=lambda k: (costs[k], k))
        if costs[high] <= enough:
            return
        for low in others:
            gap = costs[high] - costs[low]
            changes = [
                (*change, giver, taker)
                for giver, taker in zip(shares[high], shares[low], strict=True)
                if (change := _best_change(giver, taker, gap, loads, max_tokens, max_samples)) is not None
            ]
            if changes:
                break
        else:
            return
        _, out, back, giver, taker = min(changes, key=lambda change: change[0])
        _hand_over(out, giver, taker, loads)
        if back is not None:
            _hand_over(back, taker, giver, loads)
        for k in (high, low):
            costs[k] = sum(b.cost for b in shares[k])


def _hand_over(sample: int, giver: Bin, taker: Bin, loads: Loads) -> None:
    giver.remove(sample, loads)
    taker.add(sample, loads)


def _best_change(
    giver: Bin, taker: Bin, gap: float, loads: Loads, max_tokens: int | None, max_samples: int | None
) -> tuple[float, int, int | None] | None:
    """(what is left of half the gap, sample to give, sample to get back or None); None if nothing narrows the gap."""
    best, least = None, gap / 2 * (1 - _GAIN)
    candidates = sorted(taker.samples, reverse=True)
    values = [loads.costs[i] for i in candidates]
    for out in sorted(giver.samples):
        at = bisect.bisect_left(values, loads.costs[out] - gap / 2)
        backs: list[int | None] = list(candidates[max(at - 1, 0) : at + 1])
        if len(giver.samples) > 1 and (max_samples is None or len(taker.samples) < max_samples):
            backs.append(None)
        for back in backs:
            shift = loads.costs[out] - (0.0 if back is None else loads.costs[back])
            tokens = loads.lengths[out] - (0 if back is None else loads.lengths[back])
            if max_tokens is not None and not giver.tokens - max_tokens <= tokens <= max_tokens - taker.tokens:
                continue
            if abs(shift - gap / 2) < least:
                least = abs(shift - gap / 2)
                best = (least, out, back)
    return best


def deal(rows: Sequence[Sequence[Bin]], num_ranks: int) -> list[list[Bin]]:
    """Per rank one bin of each row: the costliest of a row to the rank with the least so far.

    In a row with empty bins the low ranks get the full ones.
    """
    ranks: list[list[Bin]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for row in rows:
        ordered = sorted(row, key=lambda b: (-b.cost, min(b.samples, default=0)))
        to = sorted(range(num_ranks), key=lambda d: (costs[d], d)) if ordered[-1].samples else range(num_ranks)
        for d, b in zip(to, ordered, strict=True):
            ranks[d].append(b)
            costs[d] += b.cost
    return ranks
