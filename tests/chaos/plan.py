"""What one round of chaos does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

VICTIMS = {"engine": 3, "router": 2, "validator": 1, "rank": 2, "driver": 2, "grader": 2}
"""Kinds of process, and how often each is drawn."""
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
class Plan:
    """One round: a run, resumed until it is done, and the signals that fall into it."""

    seed: int
    engine: str
    """stub or vllm."""
    program: str
    partial: bool
    """Over-sampling, with what is cut off gone on with later."""
    num_rollouts: int
    token_s: float
    """Of the stub."""
    kills: tuple[Kill, ...]

    @property
    def is_plain(self) -> bool:
        """Synchronous, each prompt in its turn: what is trained on depends on nothing but the settings."""
        return self.program == "train.py" and not self.partial

    def __str__(self) -> str:
        what = f"{self.program}{' --partial-rollout' if self.partial else ''}, {self.num_rollouts} rollouts"
        return f"{self.engine}, {what}; " + "; ".join(map(str, self.kills))


def draw_plan(
    seed: int,
    engine: str,
    *,
    victims: tuple[str, ...] = tuple(VICTIMS),
    num_kills: int | None = None,
    num_rollouts: int | None = None,
    program: str | None = None,
) -> Plan:
    """The round of a seed.

    Args:
        victims: kinds of process to draw from.
        num_kills: default: 3 to 5 with stubs, 2 or 3 with vLLM.
        num_rollouts: default: 8 with stubs, 5 with vLLM.
        program: train.py or train_async.py; default: drawn.
    """
    rng = random.Random(f"chaos {seed} {engine}")
    is_stub = engine == "stub"
    num_rollouts = num_rollouts or (8 if is_stub else 5)
    drawn_program = rng.choice(("train.py", "train.py", "train_async.py"))
    partial = rng.random() < 0.3
    token_s = rng.choice((0.02, 0.05, 0.1))
    drawn_kills = rng.randint(3, 5) if is_stub else rng.randint(2, 3)
    kills = [_draw_kill(rng, victims, num_rollouts) for _ in range(num_kills or drawn_kills)]
    kills.sort(key=lambda kill: (kill.rollout, kill.delay_s))
    return Plan(seed, engine, program or drawn_program, partial, num_rollouts, token_s, tuple(kills))


def _draw_kill(rng: random.Random, victims: tuple[str, ...], num_rollouts: int) -> Kill:
    victim = rng.choices(victims, [VICTIMS[name] for name in victims])[0]
    frozen = rng.random() < _FROZEN_SHARE
    at_start = rng.random() < _AT_START_SHARE
    rollout = -1 if at_start else rng.randrange(num_rollouts - 1)
    delay_s = rng.uniform(0.0, 10.0 if at_start else 1.5)
    thaw_s = rng.uniform(1.0, 6.0) if frozen and victim in _THAWED else None
    return Kill(victim, "STOP" if frozen else "KILL", rollout, delay_s, thaw_s)
