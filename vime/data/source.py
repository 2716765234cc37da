"""The run's data source: vime's buffer over the prompt files, or a class of the user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vime.config import Config, hook_table
from vime.config.hooks import raised
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.errors import ConfigError, DataError, VimeError
from vime.protocols import DataSource
from vime.types import Group


def make_buffer(config: Config, prompts: Sequence[Prompt] | None) -> DataBuffer:
    """The data buffer as the run is configured, over these prompts; also for data sources that wrap it.

    Args: prompts: None where the rollout function makes its own.
    Raises: ConfigError if a rollout takes more prompts than there are.
    """
    data, rollout = config.data, config.rollout
    source = DataBuffer(
        prompts,
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        weights=data.prompt_data_weights or None,
        buffer_filter=hook_table.load(config, "data.buffer_filter_path"),
        sort_by_staleness=data.buffer_sort_by_staleness,
    )
    if (size := source.epoch_size()) is not None:
        check_batch_size(config, size)
    return source


def check_batch_size(config: Config, num_prompts: int) -> None:
    """Refuse a rollout that would hold a prompt twice. Raises: ConfigError."""
    batch = config.rollout.rollout_batch_size
    if batch > num_prompts:
        raise ConfigError(
            f"--rollout-batch-size is {batch}, but --prompt-data has {num_prompts} prompts that can be used, so one "
            f"rollout would hold a prompt twice; use at most {num_prompts}"
        )


def make_own_source(config: Config, tokenizer: Any) -> DataSource:
    """An object of --data-source-path.

    Raises: ConfigError if the class cannot be used; HookError for what it raised.
    """
    make = hook_table.load(config, "data.data_source_path")
    assert make is not None, "no class is named"
    source: DataSource = make(config, tokenizer)
    return source


def take_groups(source: DataSource, n: int) -> list[Group]:
    """`source.get_groups(n)`, checked. Raises: DataError for anything but n groups, each with samples and an id."""
    name = f"{type(source).__name__}.get_groups({n})"
    try:
        groups = source.get_groups(n)
    except VimeError:
        raise
    except Exception as error:  # the user's code
        raise DataError(f"{name} raised {raised(error)}") from error
    if not isinstance(groups, list) or not all(isinstance(group, Group) for group in groups):
        raise DataError(f"{name} returned {str(groups)[:200]}; return a list of Group")
    if len(groups) != n:
        raise DataError(f"{name} returned {len(groups)} groups; a source that comes to its end starts over, or raises")
    if empty := [group.group_id for group in groups if not group.samples]:
        raise DataError(f"{name} returned the group {empty[0]} without samples")
    counts = Counter(group.group_id for group in groups)
    if twice := sorted(i for i, count in counts.items() if count > 1 or i < 0):
        raise DataError(f"{name} returned the group id {twice[0]} twice, or it is negative; every group has its own")
    return groups
