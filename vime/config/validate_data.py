"""Checks of prompt files, of training and held-out: their first rows, keys, weights and settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vime.config import Config, hook_table
from vime.config.eval_sets import check_settings, eval_sets
from vime.config.modes import reads_prompts
from vime.config.prompt_files import check_prompt_files
from vime.errors import ConfigError


def check_prompts(config: Config, *, reads_files: bool = True) -> Iterator[str]:
    """The training prompts' keys and weights, and the first rows of their files."""
    data = config.data
    if reads_prompts(config) and reads_files:
        for word in data.prompt_data:
            yield from check_prompt_files("--prompt-data", word, _needed(data.input_key, data.label_key))
    yield from _without_files(config)
    keys = {
        "--input-key": data.input_key,
        "--label-key": data.label_key,
        "--metadata-key": data.metadata_key,
        "--tool-key": data.tool_key,
    }
    for key in dict.fromkeys(keys.values()):
        flags = [flag for flag, value in keys.items() if value == key]
        if key is not None and len(flags) > 1:
            yield f"{' and '.join(flags)} are both {key!r}; each needs a key of its own"
    weights = data.prompt_data_weights
    if weights and len(weights) != len(data.prompt_data):
        yield (
            f"--prompt-data-weights gives {len(weights)} weights for {len(data.prompt_data)} words of --prompt-data; "
            "give one for each"
        )
    if wrong := [weight for weight in weights if weight <= 0]:
        yield f"--prompt-data-weights holds {wrong[0]}, but must be above 0; leave out what is not wanted"


def _without_files(config: Config) -> Iterator[str]:
    """What a run needs that has no prompt files."""
    data, rollout = config.data, config.rollout
    if not data.disable_rollout_global_dataset:
        return
    if data.data_source_path is not None:
        yield (
            f"--disable-rollout-global-dataset and --data-source-path {data.data_source_path} are both given; keep one"
        )
    if rollout.num_rollout is None and rollout.num_epoch is not None:
        yield "--num-epoch counts prompts, and --disable-rollout-global-dataset has none; give --num-rollout"
    if rollout.rollout_function_path.startswith("vime.") and rollout.custom_generate_function_path is None:
        yield (
            "--disable-rollout-global-dataset leaves nobody to make prompts; give --rollout-function-path or "
            "--custom-generate-function-path a function that does"
        )


def check_eval_sets(
    config: Config,
    *,
    reward_names: Sequence[str],
    without_label: Sequence[str],
    max_positions: int | None,
    vocab_size: float,
    reads_files: bool = True,
) -> Iterator[str]:
    """The held-out sets: their names, settings, files (if they are read) and functions.

    Args: the others are those of `check_settings`.
    """
    try:
        sets = eval_sets(config)
    except ConfigError as error:
        yield from error.problems
        return
    yield from check_settings(
        sets,
        reward_names=reward_names,
        without_label=without_label,
        max_positions=max_positions,
        vocab_size=vocab_size,
    )
    for held_out in sets:
        needed = _needed(held_out.input_key, held_out.label_key)
        if reads_files:
            yield from check_prompt_files(f"held-out set {held_out.name}:", held_out.path, needed)
        path = held_out.custom_generate_function_path
        if path is not None and path != config.rollout.custom_generate_function_path:
            try:
                hook_table.load_path(config, "rollout.custom_generate_function_path", path)
            except ConfigError as error:
                yield from (f"held-out set {held_out.name}: custom_generate_function_path {p}" for p in error.problems)


def _needed(input_key: str, label_key: str | None) -> Sequence[str]:
    return [input_key, *([label_key] if label_key is not None else [])]
