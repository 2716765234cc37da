"""The settings of fully asynchronous training, a section beside those of `vime.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.schema import setting

STALE_ACTIONS = ("drop", "mask", "correct")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Generation that never waits for the trainer; read with --fully-async alone."""

    fully_async: bool = setting(
        False, "train_async.py: engines generate all the time, and the trainer takes what is finished"
    )
    max_staleness: int = setting(2, "versions that a group's oldest trainable token may be behind the trainer")
    stale_groups: str = setting(
        "drop",
        "older groups. drop: their prompts are generated anew; mask: their old tokens get no gradient; correct: they "
        "are trained on as they are, with --use-tis or --use-rs",
        choices=STALE_ACTIONS,
    )
    max_groups_in_flight: int | None = setting(
        None, "groups that are generated at a time; default: --rollout-batch-size"
    )
    update_weights_in_flight: bool = setting(
        True, "engines get weights while samples are generated, which go on with them; --no-...: between samples"
    )
