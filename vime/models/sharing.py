"""Whether trainer and engines that share devices (--colocate) both fit, or take turns: a decision from bytes alone.

Three ways, cheapest first:

    both stay           the engine keeps its share while the trainer works
    engines sleep       the trainer keeps weights, gradients and optimizer state, and works in the engine's place
    both take turns     each has the device to itself; at a weight sync both sides' weights are there
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vime.errors import ConfigError
from vime.models.memory import GIB

MARGIN = 0.03
"""Part of a device that nothing is planned for: fragments, and what estimates leave out."""
MAX_UTILIZATION = 0.9
"""Of an engine that has the device to itself; its CUDA graphs come on top."""
ASLEEP_BYTES = 2 * GIB
"""What stays on the device of an engine that sleeps: its context, CUDA graphs and their buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of the device that is wanted most."""

    device: int
    step: int
    """The trainer at the fullest moment of a step."""
    static: int
    """The trainer between steps: weights, gradients, optimizer state, context."""
    away: int
    """What stays of a trainer that has left: context and communicators."""
    late: int = 0
    """Of `static`, what a trainer takes only with its first step."""
    engine: int
    """An engine without a KV cache."""
    cache: int
    """A KV cache for the requests in flight, each as long as it may get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user decided; None: to be decided here."""

    offload_train: bool | None = None
    offload_rollout: bool | None = None
    utilization: float | None = None
    """--vllm-gpu-memory-utilization."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who moves, and the engine's share of a device."""

    engines_sleep: bool
    trainer_leaves: bool
    utilization: float

    @property
    def moves(self) -> bool:
        """Whether anything does."""
        return self.engines_sleep or self.trainer_leaves

    def __str__(self) -> str:
        if self.trainer_leaves:
            who = "engines sleep while the trainer works, and it leaves the device while they generate"
        elif self.engines_sleep:
            who = "engines sleep while the trainer works, which keeps what it has between steps"
        else:
            who = "nothing moves"
        return f"{who}; an engine takes {self.utilization:g} of a device"


_STAY, _SLEEP, _TURNS = (False, False), (True, False), (True, True)


def decide(need: Need, wishes: Wishes = Wishes()) -> Sharing:
    """The cheapest way that leaves the engine the share it wants; the last one allowed where none does.

    Raises: ConfigError if that share would not even hold the engine's weights, or the user's own share does not fit.
    """
    ways = allowed_ways(wishes)
    rooms = [_room(need, sleeps=sleeps, leaves=leaves) for sleeps, leaves in ways]
    most = min(MAX_UTILIZATION, _room(need, sleeps=True, leaves=True))
    wanted = wishes.utilization
    if wanted is None:
        wanted = min((need.engine + need.cache) / need.device, most)
    way, room = next(((w, r) for w, r in zip(ways, rooms, strict=True) if r >= wanted), (ways[-1], rooms[-1]))
    if wishes.utilization is not None:
        if room < wishes.utilization and way != _TURNS:
            raise ConfigError(
                f"--vllm-gpu-memory-utilization is {wishes.utilization:g} with --colocate, but "
                f"{describe(need)} leave the engine {max(room, 0):.2f} of the device; use less, or drop "
                f"{'--no-offload-train' if way == _SLEEP else '--no-offload-rollout'}"
            )
        return Sharing(*way, wishes.utilization)
    # Where nothing moves, the trainer's estimate gets what the engine has no use for.
    share = int(100 * min(room, MAX_UTILIZATION, wanted + 0.01 if way == _STAY else 1.0)) / 100
    if share * need.device < need.engine:
        raise ConfigError(
            f"--colocate: {describe(need)} leave an engine {max(room, 0):.2f} of the device, but it needs "
            f"{need.engine / need.device:.2f} before it has a KV cache; use more ranks or less memory a rank "
            "(`vime plan`), "
            + ("drop --no-offload-rollout and --no-offload-train, " if way != _TURNS else "")
            + "or separate devices"
        )
    return Sharing(*way, share)


def settle(sharing: Sharing, need: Need, wishes: Wishes, *, used: int) -> Sharing:
    """The decision again, once the trainer is built: what was measured may show that more has to move.

    Args: used: bytes in use on the device, by all processes, now: with the engine awake if it stays, else asleep.
    Raises: ConfigError if what would have to move may not.
    """
    if sharing.trainer_leaves:
        return sharing
    share = round(sharing.utilization * need.device)
    if not sharing.engines_sleep:
        if used + need.late + (need.step - need.static) <= need.device:
            return sharing
        sharing = replace(sharing, engines_sleep=True)
        used -= share
    if used + need.late + share <= need.device and wishes.offload_rollout is not False:
        return sharing
    if wishes.offload_rollout is False or wishes.offload_train is False:
        raise ConfigError(
            f"--colocate: {used / GIB:.1f} GiB of the device are in use beside an engine's share of {share / GIB:.1f}, "
            f"and the trainer's first step takes {(need.late + need.step - need.static) / GIB:.1f} more, of "
            f"{need.device / GIB:.1f} GiB; lower --vllm-gpu-memory-utilization, or drop --no-offload-train and "
            "--no-offload-rollout"
        )
    return replace(sharing, trainer_leaves=True)


def describe(need: Need) -> str:
    """The figures that the decision is made of, in words."""
    return (
        f"{need.device / GIB:.1f} GiB, of which the trainer takes {need.step / GIB:.1f} in a step and "
        f"{need.static / GIB:.1f} between steps (estimated), and an engine {need.engine / GIB:.1f} besides a KV cache, "
        f"{need.cache / GIB:.1f} for all requests in flight,"
    )


def allowed_ways(wishes: Wishes) -> list[tuple[bool, bool]]:
    """(engines sleep, trainer leaves) of the ways that the flags leave, the cheapest first.

    Raises: ConfigError if the flags contradict each other.
    """
    ways = [_STAY, _SLEEP, _TURNS]
    if wishes.offload_rollout is not None:
        ways = [way for way in ways if way[0] == wishes.offload_rollout]
    if wishes.offload_train is not None:
        ways = [way for way in ways if way[1] == wishes.offload_train]
    if not ways:
        raise ConfigError("--offload-train with --no-offload-rollout frees memory that nobody takes; give one of them")
    return ways


def _room(need: Need, *, sleeps: bool, leaves: bool) -> float:
    """The part of the device that is there for an engine which is awake."""
    beside = need.away if leaves else need.static if sleeps else need.step
    return 1 - MARGIN - beside / need.device
