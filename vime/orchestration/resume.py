"""Where a run begins: from the start, or from a checkpoint, decided before any process is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.dtype import run_dtype
from vime.config.modes import trains
from vime.errors import ConfigError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import (
    Checkpoint,
    find_checkpoints,
    load_checkpoint,
    load_weights,
    open_checkpoint,
    rollout_of,
    set_aside,
)
from vime.loop.compatibility import changes, conflicts, settings_to_keep
from vime.loop.replay import ReplayedRollouts
from vime.protocols import DataSource, Trainer


def checkpoint_to_load(config: Config) -> Checkpoint | None:
    """The checkpoint that --load means; None for a run from the start.

    One command with --load and --save on the same folder starts a run and goes on with it, however often it is given.
    Raises: ConfigError if --load names another folder without checkpoints, or the checkpoint cannot be read.
    """
    settings = config.checkpoint
    if settings.load is None:
        return None
    folder = Path(settings.load)
    if settings.goes_on and settings.ckpt_step is None and not find_checkpoints(folder):
        return None
    if not trains(config):
        raise ConfigError(
            f"--load {folder}: engines serve --hf-checkpoint where no trainer is started (--debug-rollout-only), so a "
            "checkpoint cannot be used; leave --load out, or write the checkpoint by --save-hf and start from that"
        )
    checkpoint = open_checkpoint(folder, settings.ckpt_step)
    if checkpoint.is_weights_alone and not settings.finetune:
        raise ConfigError(f"--load {folder} holds weights alone (`vime convert` made it); add --finetune")
    return checkpoint


def first_rollout(config: Config, checkpoint: Checkpoint | None) -> int:
    """The number of the first rollout to run.

    Raises: ConfigError if checkpoints of --save would come after it: they are another run's, or of a run that this
        one leaves, and would be taken for newer ones.
    """
    start = config.rollout.start_rollout_id
    if start is None:
        start = 0 if checkpoint is None or config.checkpoint.finetune else checkpoint.rollout_id + 1
    if config.checkpoint.save is not None and trains(config):
        folder = Path(config.checkpoint.save)
        passed_over = {} if checkpoint is None else dict(checkpoint.skipped)
        if later := [p for p in find_checkpoints(folder) if rollout_of(p) >= start and p not in passed_over]:
            raise ConfigError(
                f"--save {folder} holds {later[-1].name}, but this run begins with rollout {start}: go on from it by "
                f"--load {folder}, or give another folder to --save"
            )
    return start


def check_settings(config: Config, checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
    """Settings that changed since the checkpoint and may, in words.

    Args: now: as vime.loop.compatibility.settings_to_keep gives them.
    Raises: ConfigError naming each setting under which the checkpoint cannot be used.
    """
    finetune = config.checkpoint.finetune
    weights_only = finetune or config.checkpoint.no_load_optim
    if problems := list(conflicts(checkpoint.settings, now, weights_only=weights_only)):
        raise ConfigError([f"--load {checkpoint.path}: {problem}" for problem in problems])
    return [] if finetune else changes(checkpoint.settings, now)


def check_load(config: Config, hf_config: Mapping[str, Any]) -> None:
    """What a run finds out about --load and --save before it starts. Args: hf_config: the model's config.json.

    Raises: ConfigError where that refuses it.
    """
    checkpoint = checkpoint_to_load(config)
    first_rollout(config, checkpoint)
    if checkpoint is not None:
        kept = settings_to_keep(config, hf_config, dtype=run_dtype(config.megatron, hf_config))
        check_settings(config, checkpoint, kept)


def replayed_rollouts(config: Config, start: int) -> ReplayedRollouts | None:
    """The files to train on in the place of generation, from rollout `start`. Raises: ConfigError if any lacks."""
    debug, end = config.debug, config.rollout.num_rollout
    if debug.load_debug_rollout_data is None or end is None:
        return None
    part = debug.load_debug_rollout_data_subsample
    return ReplayedRollouts(debug.load_debug_rollout_data, range(start, end), subsample=part)


def load(
    config: Config,
    checkpoint: Checkpoint,
    trainer: Trainer,
    source: DataSource,
    stop: StopRule,
    *,
    changed: Sequence[str],
) -> str:
    """Load the checkpoint to go on from; damaged newer ones in the folder of --save are renamed.

    Args: changed: as `check_settings` gives it.
    Returns: what was done, in words.
    """
    start = first_rollout(config, checkpoint)
    if config.checkpoint.finetune:
        load_weights(checkpoint, trainer)
        done = f"took the weights of {checkpoint.path}; everything else begins anew"
    else:
        load_checkpoint(checkpoint, trainer, source, stop)
        differing = f"; settings changed since: {', '.join(changed)}" if changed else ""
        done = f"resumed from {checkpoint.path}; next is rollout {start}{differing}"
    if not checkpoint.skipped:
        return done
    passed_over = "; ".join(f"{path.name} is damaged ({damage})" for path, damage in checkpoint.skipped)
    moved = set_aside(checkpoint) if config.checkpoint.goes_on else []
    aside = f" and is called {', '.join(path.name for path in moved)} now" if moved else ""
    return f"{passed_over}{aside}; {done}"
