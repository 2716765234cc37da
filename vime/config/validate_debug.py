"""Checks of the debugging paths: which stages are left out, and the files they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.config import Config
from vime.config.modes import replays, rollout_data_to_save, train_data_to_save, trains


def check_debug(config: Config, platform: str = "cpu") -> Iterator[str]:
    """Modes that contradict each other, paths that cannot work, and what the platform cannot profile."""
    debug, rollout = config.debug, config.rollout
    if debug.debug_train_only and not replays(config):
        yield (
            "--debug-train-only starts no engines, so it needs rollouts: add --load-debug-rollout-data with the files "
            "of --save-debug-rollout-data, or an earlier run's folder"
        )
    if debug.debug_rollout_only and (debug.debug_train_only or replays(config)):
        other = "--debug-train-only" if debug.debug_train_only else "--load-debug-rollout-data"
        yield f"--debug-rollout-only starts no trainer and {other} no engines, so nothing would run; keep one"
    if (part := debug.load_debug_rollout_data_subsample) is not None and not 0 < part <= 1:
        yield f"--load-debug-rollout-data-subsample is {part}, but must be above 0 and at most 1: a part of the groups"
    if replays(config) and rollout.num_rollout is None:
        yield "--load-debug-rollout-data reads no prompts, so --num-epoch means nothing; give --num-rollout"
    if debug.dump_details is not None:
        for name in ("save_debug_rollout_data", "save_debug_train_data"):
            if getattr(debug, name) is not None:
                yield f"--dump-details sets --{name.replace('_', '-')} itself; give one of the two"
    yield from _check_templates(config)
    yield from _check_profiling(config, platform)


def _check_profiling(config: Config, platform: str) -> Iterator[str]:
    debug, cluster = config.debug, config.cluster
    if debug.profile_step_start >= debug.profile_step_end:
        yield (
            f"--profile-step-start is {debug.profile_step_start}, not below --profile-step-end "
            f"{debug.profile_step_end}, the rollout before which profiling ends"
        )
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if wrong := [rank for rank in debug.profile_ranks if not 0 <= rank < ranks]:
        yield f"--profile-ranks holds {wrong[0]}, but training ranks go from 0 to {ranks - 1}"
    if platform == "cpu" and debug.record_memory_history:
        yield "--record-memory-history is CUDA's, and the cpu platform has none; leave it out"
    if platform == "cpu" and debug.profile and not debug.use_pytorch_profiler:
        yield "--profile alone marks a range for nsys, which is for CUDA; add --use-pytorch-profiler"


def _check_templates(config: Config) -> Iterator[str]:
    saved = {
        "--save-debug-rollout-data": rollout_data_to_save(config),
        "--save-debug-train-data": train_data_to_save(config) if trains(config) else None,
    }
    for flag, text in {**saved, "--load-debug-rollout-data": config.debug.load_debug_rollout_data}.items():
        if text is None:
            continue
        try:
            first, second = text.format(rollout_id=0), text.format(rollout_id=1)
        except (KeyError, IndexError, ValueError):
            yield f"{flag} {text}: only {{rollout_id}} is replaced; other braces are not allowed"
            continue
        if flag in saved and (found := Path(first).suffix) in (".pt", ".pth", ".pkl"):
            kind = "Parquet" if flag == "--save-debug-rollout-data" else "npz"
            yield f"{flag} {text} ends in {found}, but {kind} is written; name it *.{kind.lower()}"
        if flag in saved and first == second and config.rollout.num_rollout != 1:
            yield f"{flag} {text} names one file for all rollouts; put {{rollout_id}} into it"
        if flag in saved and (blocked := _file_above(Path(first))):
            yield f"{flag} {text} cannot be made: {blocked} is a file"


def _file_above(path: Path) -> Path | None:
    return next((p for p in path.absolute().parents if p.is_file()), None)
