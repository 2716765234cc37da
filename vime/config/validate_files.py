"""Checks that look outside the settings: files, folders, users' functions."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from vime.config import Config, hook_table


def check_paths(config: Config) -> Iterator[str]:
    """Folders that must exist, or must be writable."""
    checkpoint = config.checkpoint
    if checkpoint.load is not None and not checkpoint.goes_on and not Path(checkpoint.load).is_dir():
        yield f"--load {checkpoint.load}: there is no such folder"
    if checkpoint.ref_load is not None and not (Path(checkpoint.ref_load) / "config.json").is_file():
        yield (
            f"--ref-load {checkpoint.ref_load} holds no config.json; it must be an HF checkpoint folder "
            "(`vime convert` makes one of a training checkpoint)"
        )
    for flag, text in (
        ("--save", checkpoint.save),
        ("--save-hf", checkpoint.save_hf),
        ("--update-weight-disk-dir", config.sync.update_weight_disk_dir),
        ("--run-dir", config.log.run_dir),
        ("--wandb-dir", config.log.wandb_dir),
    ):
        if text is None:
            continue
        if blocked := _blocking_file(Path(text)):
            yield f"{flag} {text} cannot be made: {blocked} is a file"
        elif not os.access(parent := _nearest_folder(Path(text)), os.W_OK | os.X_OK):
            yield f"{flag} {text} cannot be made: {parent} is not writable"
    if config.log.use_wandb and importlib.util.find_spec("wandb") is None:
        yield "--use-wandb needs the package wandb, which is not installed; install vime[wandb], or leave it out"
    if checkpoint.save_hf is not None:
        for flag, source in (
            ("--hf-checkpoint", checkpoint.hf_checkpoint),
            ("--ref-load", checkpoint.ref_load),
            ("--critic-load", config.critic.critic_load),
        ):
            if source and Path(source).is_dir() and Path(source).resolve() == Path(checkpoint.save_hf).resolve():
                yield f"--save-hf {checkpoint.save_hf} is the folder of {flag}, which it would overwrite; give another"
    for flag, text, names in (
        ("--save-hf", checkpoint.save_hf, {"rollout_id": 0}),
        ("--run-dir", config.log.run_dir, {"time": ""}),
    ):
        try:
            _ = text and text.format(**names)
        except (KeyError, IndexError, ValueError):
            yield f"{flag} {text}: only {{{next(iter(names))}}} is replaced; other braces are not allowed"


def check_hooks(config: Config) -> Iterator[str]:
    """Every dotted path: importable, callable, with the parameters it will be called with."""
    yield from hook_table.problems(config)
    if config.algo.loss_type == "custom_loss" and config.algo.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs the loss: --custom-loss-function-path package.module.function"


def _blocking_file(path: Path) -> Path | None:
    """The file that stands where a folder on this path would have to be."""
    return next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next((p for p in (path, *path.absolute().parents) if p.is_dir()), Path("/"))
