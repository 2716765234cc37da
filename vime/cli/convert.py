"""`vime convert`: an HF checkpoint as a training checkpoint of weights alone, or a training checkpoint as an HF one."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vime.errors import ConfigError
from vime.loop.checkpoint import WEIGHTS_FILE, weights_of
from vime.loop.checkpoint_writing import write_weights_file
from vime.loop.compatibility import other_models, weights_to_keep

_KINDS = {True: "weights for --load with --finetune", False: "an HF checkpoint"}
"""What is made, by whether it is made of an HF checkpoint."""


def convert(
    source: Path,
    target: Path,
    *,
    hf_checkpoint: Path | None = None,
    ckpt_step: int | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> str:
    """Write `target`, whole or not at all, and compare what lies there with what was read.

    Args:
        source: an HF checkpoint, or a training one: a run's folder of them, one of them, or what this command made.
        hf_checkpoint: for a training checkpoint, the HF checkpoint it was trained from.
        ckpt_step: of a run's folder the checkpoint of this rollout; None: the newest.
        dtype: "float32" or "bfloat16"; None: as it is.
        overwrite: replace a conversion that is there.
    Returns: what was done, in words. Raises: ConfigError for what cannot be converted; OSError when the disk is full.
    """
    is_hf = (source / "config.json").is_file()
    problems = list(_problems(source, target, is_hf, hf_checkpoint, ckpt_step, overwrite))
    if problems:
        raise ConfigError(problems)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = _write(source, partial, is_hf, hf_checkpoint, ckpt_step, dtype)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return f"{target}: {text}, read back and compared"


def _problems(
    source: Path, target: Path, is_hf: bool, hf_checkpoint: Path | None, ckpt_step: int | None, overwrite: bool
) -> Iterator[str]:
    if not source.is_dir():
        yield f"{source} is no folder"
        return
    if is_hf and hf_checkpoint is not None:
        yield f"{source} is an HF checkpoint itself; leave --hf-checkpoint out"
    if not is_hf and hf_checkpoint is None:
        yield (
            f"{source} is no HF checkpoint (it has no config.json); for a training checkpoint, add --hf-checkpoint, "
            "what it was trained from: config, tokenizer and tensors that are not trained come from there"
        )
    if is_hf and ckpt_step is not None:
        yield f"--ckpt-step is {ckpt_step}, but {source} is an HF checkpoint"
    if target.exists() and target.resolve() in {source.resolve(), (hf_checkpoint or source).resolve()}:
        yield f"{target} is what is read; choose another target"
    elif target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        made_here = (target / ("config.json" if not is_hf else WEIGHTS_FILE)).is_file()
        if not overwrite:
            yield f"{target} exists; choose another folder" + (", or add --overwrite" if made_here else "")
        elif not made_here:
            there = "an HF checkpoint" if (target / "config.json").is_file() else "converted weights"
            if not (target / "config.json").is_file() and not (target / WEIGHTS_FILE).is_file():
                there = "other files"
            yield (
                f"{target} holds {there}, and --overwrite replaces only {_KINDS[is_hf]}, which is what would be "
                "written; choose another folder"
            )


def _write(
    source: Path, target: Path, is_hf: bool, hf_checkpoint: Path | None, ckpt_step: int | None, dtype: str | None
) -> str:
    import torch

    from vime.trainer.megatron.patches.lean_import import lean_import

    with lean_import():
        from vime.trainer.megatron.checkpoints import convert as convert_weights
    wanted = None if dtype is None else getattr(torch, dtype)
    if is_hf:
        done = convert_weights.to_training(source, target / "trainer", dtype=wanted)
        name = str(done.dtype).removeprefix("torch.")
        write_weights_file(target, weights_to_keep(_config_of(source), dtype=name))
    else:
        assert hf_checkpoint is not None, "checked"
        trainer, settings = weights_of(source, ckpt_step)
        if settings is not None:
            now = weights_to_keep(_config_of(hf_checkpoint), dtype="")
            if problems := list(other_models(settings, now)):
                raise ConfigError([f"{source}: {problem}" for problem in problems])
        done = convert_weights.to_hf(trainer, hf_checkpoint, target, dtype=wanted)
        name = str(done.dtype).removeprefix("torch.")
    return f"{_KINDS[is_hf]}, {done.num_tensors} tensors, {done.num_bytes / 1e6:,.1f} MB, {name}"


def _config_of(folder: Path) -> dict[str, Any]:
    from vime.trainer.megatron.weights.hf_io import read_config

    return read_config(folder)


def run(argv: Sequence[str]) -> int:
    """`vime convert …`. Returns: the exit code."""
    parser = argparse.ArgumentParser(
        prog="vime convert",
        description="Make a training checkpoint of an HF one, or an HF one of a training checkpoint: one process, no "
        "device, one tensor in memory at a time.",
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, help="an HF checkpoint, or a training one (a run's --save, or one in it)")
    parser.add_argument("target", type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--hf-checkpoint", type=Path, help="of a training checkpoint: what it was trained from")
    parser.add_argument("--ckpt-step", type=int, help="the checkpoint of this rollout; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights; default: as they are")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint of the same kind at the target")
    try:
        print(convert(**vars(parser.parse_args(argv))))
    except OSError as error:  # a full disk, most often
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
