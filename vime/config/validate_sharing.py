"""Checks of who leaves the devices that trainer and engines share."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config
from vime.config.modes import generates, trains

_FLAGS = ("offload", "offload_train", "offload_rollout")


def check_sharing(config: Config, *, platform: str, turns_problem: str | None) -> Iterator[str]:
    """Contradictions, and what the platform cannot do.

    Args: platform: its name. turns_problem: why nothing can leave a device there; None where it can.
    """
    cluster = config.cluster
    given = {name: value for name in _FLAGS if (value := getattr(cluster, name)) is not None}
    if not given:
        return
    flags = ", ".join(_flag(name, value) for name, value in given.items())
    if not cluster.colocate:
        yield f"{flags}: without --colocate trainer and engines have devices of their own; add it, or drop {flags}"
        return
    if not (generates(config) and trains(config)):
        yield f"{flags}: this run starts no {'engines' if trains(config) else 'trainer'} to share devices with; drop it"
        return
    if turns_problem is not None:
        if wanted := [_flag(name, True) for name, value in given.items() if value]:
            yield f"{', '.join(wanted)}: the {platform} platform cannot do it: {turns_problem}; drop it"
        return
    train, rollout = (
        cluster.offload if own is None else own for own in (cluster.offload_train, cluster.offload_rollout)
    )
    if train and rollout is False:
        yield (
            f"{flags}: a trainer that leaves frees memory that engines which stay do not take; drop the one or the "
            "other"
        )


def _flag(name: str, value: bool) -> str:
    return f"--{'' if value else 'no-'}{name.replace('_', '-')}"
