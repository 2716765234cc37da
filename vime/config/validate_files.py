"""Checks that look outside the settings: files, folders, users' functions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vime.config import Config, hook_table
from vime.config.eval_sets import check_settings, eval_sets
from vime.errors import ConfigError

_LINES_READ = 64  # enough to see a wrong key or format; loading the data reads every line


def check_paths(config: Config) -> Iterator[str]:
    """Folders that must exist, or must be writable."""
    checkpoint = config.checkpoint
    if checkpoint.load is not None and checkpoint.load != checkpoint.save and not Path(checkpoint.load).is_dir():
        yield f"--load {checkpoint.load}: there is no such folder"
    if checkpoint.ref_load is not None and not (Path(checkpoint.ref_load) / "config.json").is_file():
        yield f"--ref-load {checkpoint.ref_load} holds no config.json; it must be an HF checkpoint folder"
    for flag, text in (
        ("--save", checkpoint.save),
        ("--save-hf", checkpoint.save_hf),
        ("--update-weight-disk-dir", config.sync.update_weight_disk_dir),
        ("--run-dir", config.log.run_dir),
    ):
        if text is None:
            continue
        if blocked := _blocking_file(Path(text)):
            yield f"{flag} {text} cannot be made: {blocked} is a file"
        elif not os.access(parent := _nearest_folder(Path(text)), os.W_OK | os.X_OK):
            yield f"{flag} {text} cannot be made: {parent} is not writable"
    if checkpoint.save_hf is not None:
        for flag, source in (("--hf-checkpoint", checkpoint.hf_checkpoint), ("--ref-load", checkpoint.ref_load)):
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


def check_prompts(config: Config) -> Iterator[str]:
    """The training prompts' first lines."""
    data = config.data
    if data.prompt_data is not None:
        yield from _check_jsonl("--prompt-data", data.prompt_data, data.input_key, data.label_key)


def check_eval_sets(
    config: Config, *, reward_names: Sequence[str], max_positions: int | None, vocab_size: float
) -> Iterator[str]:
    """The held-out sets: their names, settings, files and functions."""
    try:
        sets = eval_sets(config)
    except ConfigError as error:
        yield from error.problems
        return
    yield from check_settings(sets, reward_names=reward_names, max_positions=max_positions, vocab_size=vocab_size)
    for held_out in sets:
        yield from _check_jsonl(f"held-out set {held_out.name}:", held_out.path, held_out.input_key, held_out.label_key)
        path = held_out.custom_generate_function_path
        if path is not None and path != config.rollout.custom_generate_function_path:
            try:
                hook_table.load_path(config, "rollout.custom_generate_function_path", path)
            except ConfigError as error:
                yield from (f"held-out set {held_out.name}: custom_generate_function_path {p}" for p in error.problems)


def check_hooks(config: Config) -> Iterator[str]:
    """Every dotted path: importable, callable, with the parameters it will be called with."""
    return hook_table.problems(config)


def _check_jsonl(flag: str, path: str, input_key: str, label_key: str | None) -> Iterator[str]:
    keys = [input_key, *([label_key] if label_key is not None else [])]
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            seen = 0
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                seen += 1
                if problem := _line_problem(line, keys):
                    yield f"{flag} {path}, line {number}: {problem}"
                    return
                if seen == _LINES_READ:
                    break
    except OSError as error:
        yield f"{flag} {path} cannot be read: {error.strerror or error}"
        return
    except UnicodeDecodeError as error:
        yield f"{flag} {path} is not UTF-8 text ({error.reason}); it must be JSONL"
        return
    if not seen:
        yield f"{flag} {path} is empty"


def _line_problem(line: str, keys: Sequence[str]) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); each line holds one object"
    if not isinstance(record, dict):
        return f"holds a {type(record).__name__}, not an object"
    if missing := [key for key in keys if key not in record]:
        return (
            f"has no key {', '.join(map(repr, missing))}, only {', '.join(map(repr, record))}; "
            "see --input-key and --label-key"
        )
    return None


def _blocking_file(path: Path) -> Path | None:
    """The file that stands where a folder on this path would have to be."""
    return next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next((p for p in (path, *path.absolute().parents) if p.is_dir()), Path("/"))
