"""The data source of a run: files checked before anything starts, the source built while the engines start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime.config import Config, hook_table, modes
from vime.data.buffer import DataBuffer
from vime.data.prompts import CheckedRows, check_prompts, tokenise_prompts
from vime.errors import ConfigError
from vime.loop.replay import ReplaySource
from vime.protocols import DataSource
from vime.rewards import REWARDS

_PROBE_PROMPTS = 4
_PROBE_TEXTS = ("1 + 1 =", "The capital of France is", "def add(a, b):", "Once upon a time")


def check_data(config: Config) -> CheckedRows | None:
    """Read and check every row of the prompt files. None where the run has no use for them.

    Raises: DataError, ConfigError.
    """
    if modes.replays(config):
        return None
    return check_prompts(config, REWARDS if modes.generates(config) else None)


def build_source(config: Config, rows: CheckedRows | None, tokenizer: Any) -> DataSource:
    """What hands out the run's prompts.

    Args: rows: of `check_data`.
    Raises: DataError if prompts cannot be rendered; ConfigError if a rollout takes more prompts than there are.
    """
    if modes.replays(config):
        return ReplaySource()
    data, rollout = config.data, config.rollout
    assert rows is not None, "without prompts there is nothing to hand out"
    source = DataBuffer(
        tokenise_prompts(config, rows, tokenizer),
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        weights=data.prompt_data_weights or None,
        buffer_filter=hook_table.load(config, "data.buffer_filter_path"),
        sort_by_staleness=data.buffer_sort_by_staleness,
    )
    size = source.epoch_size()
    if size is not None and rollout.rollout_batch_size > size:
        raise ConfigError(
            f"--rollout-batch-size is {rollout.rollout_batch_size}, but --prompt-data has {size} prompts that can be "
            f"used, so one rollout would hold a prompt twice; use at most {size}"
        )
    return source


def probe_prompts(source: DataSource, tokenizer: Any) -> Sequence[Sequence[int]]:
    """Token ids of a few prompts, which the weight sync's probe continues: the run's own, where they are known."""
    if isinstance(source, DataBuffer) and len(source.prompts):
        return [prompt.tokens for prompt in source.prompts[:_PROBE_PROMPTS]]
    return [ids for ids in tokenizer(list(_PROBE_TEXTS), add_special_tokens=False)["input_ids"] if ids]
