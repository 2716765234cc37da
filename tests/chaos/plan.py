"""What one round of chaos does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

VICTIMS = {"engine": 3, "router": 2, "validator": 1, "rank": 2, "driver": 2, "grader": 2}
"""Kinds of process, and how often each is drawn."""
LOOPS = {"sync": 2, "overlapped": 1, "fully_async": 2}
"""And each loop."""
_FROZEN_SHARE = 0.3
_THAWED = ("rank", "driver")  # nobody ends these when they are frozen: they go on after a while
_AT_START_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Kill:
    """One process meets a signal."""

    victim: str
    signal: str
    """KILL or STOP."""
    rollout: int
    """Once so many rollouts were trained on; -1: while the run starts."""
    delay_s: float
    """And so many seconds later."""
    thaw_s: float | None
    """Until SIGCONT; None: it stays stopped."""

    def __str__(self) -> str:
        thaw = f" for {self.thaw_s:.1f} s" if self.thaw_s is not None else ""
        return f"{self.victim} SIG{self.signal}{thaw} at rollout {self.rollout} + {self.delay_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Stream:
    """What a fully asynchronous run is told."""

    max_staleness: int
    stale_groups: str
    """What becomes of older ones: drop, mask or correct."""
    in_flight: bool
    """Weights change under samples, not between them."""
    max_groups: int | None
    """In flight; None: as many as a rollout has."""

    def flags(self) -> list[str]:
        """Of train_async.py."""
        return [
            *("--fully-async", "--max-staleness", str(self.max_staleness), "--stale-groups", self.stale_groups),
            *(() if self.in_flight else ("--no-update-weights-in-flight",)),
            *(("--max-groups-in-flight", str(self.max_groups)) if self.max_groups is not None else ()),
            *(("--use-tis",) if self.stale_groups == "correct" else ()),
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """One round: a run, resumed until it is done, and the signals that fall into it."""

    seed: int
    engine: str
    """stub or vllm."""
    loop: str
    """One of `LOOPS`."""
    partial: bool
    """What is cut off is gone on with later; there is over-sampling, so that something is, but in a stream."""
    num_rollouts: int
    token_s: float
    """Of the stub."""
    kills: tuple[Kill, ...]
    stream: Stream | None = None
    """Of the loop fully_async."""

    @property
    def program(self) -> str:
        """What starts the run."""
        return "train.py" if self.loop == "sync" else "train_async.py"

    @property
    def is_plain(self) -> bool:
        """Synchronous, each prompt in its turn: what is trained on depends on nothing but the settings."""
        return self.loop == "sync" and not self.partial

    @property
    def begins_no_more_than_needed(self) -> bool:
        """No prompt is left over at the end, so those trained on are the first of the file, whatever was faster."""
        return not self.partial or self.stream is not None

    def __str__(self) -> str:
        flags = [*(self.stream.flags() if self.stream else ()), *(("--partial-rollout",) if self.partial else ())]
        what = f"{' '.join([self.program, *flags])}, {self.num_rollouts} rollouts"
        return f"{self.engine}, {what}; " + "; ".join(map(str, self.kills))


def draw_plan(
    seed: int,
    engine: str,
    *,
    victims: tuple[str, ...] = tuple(VICTIMS),
    num_kills: int | None = None,
    num_rollouts: int | None = None,
    loop: str | None = None,
) -> Plan:
    """The round of a seed.

    Args:
        victims: kinds of process to draw from.
        num_kills: default: 3 to 5 with stubs, 2 or 3 with vLLM.
        num_rollouts: default: 8 with stubs, 5 with vLLM.
        loop: one of `LOOPS`; default: drawn.
    """
    rng = random.Random(f"chaos {seed} {engine}")
    is_stub = engine == "stub"
    num_rollouts = num_rollouts or (8 if is_stub else 5)
    drawn_loop = rng.choices(list(LOOPS), list(LOOPS.values()))[0]
    partial = rng.random() < 0.3
    token_s = rng.choice((0.02, 0.05, 0.1))
    drawn_kills = rng.randint(3, 5) if is_stub else rng.randint(2, 3)
    kills = [_draw_kill(rng, victims, num_rollouts) for _ in range(num_kills or drawn_kills)]
    kills.sort(key=lambda kill: (kill.rollout, kill.delay_s))
    stream, loop = _draw_stream(rng), loop or drawn_loop
    is_stream = loop == "fully_async"
    return Plan(seed, engine, loop, partial, num_rollouts, token_s, tuple(kills), stream if is_stream else None)


def _draw_stream(rng: random.Random) -> Stream:
    max_staleness = rng.choice((0, 1, 1, 2))
    return Stream(
        max_staleness=max_staleness,
        stale_groups=rng.choice(("drop", "drop", "mask", "correct")),
        in_flight=rng.random() < 0.5,
        max_groups=rng.choice((None, 3, *(() if max_staleness == 0 else (12,)))),
    )


def _draw_kill(rng: random.Random, victims: tuple[str, ...], num_rollouts: int) -> Kill:
    victim = rng.choices(victims, [VICTIMS[name] for name in victims])[0]
    frozen = rng.random() < _FROZEN_SHARE
    at_start = rng.random() < _AT_START_SHARE
    rollout = -1 if at_start else rng.randrange(num_rollouts - 1)
    delay_s = rng.uniform(0.0, 10.0 if at_start else 1.5)
    thaw_s = rng.uniform(1.0, 6.0) if frozen and victim in _THAWED else None
    return Kill(victim, "STOP" if frozen else "KILL", rollout, delay_s, thaw_s)
