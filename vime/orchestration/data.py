"""The data source of a run: files checked before anything starts, the source built while the engines start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.config import Config, modes
from vime.config.eval_sets import eval_sets
from vime.data.buffer import DataBuffer
from vime.data.prompts import CheckedRows, check_prompts, check_rows, tokenise_prompts
from vime.data.records import RowKeys
from vime.data.source import check_batch_size, make_buffer, make_own_source
from vime.loop.replay import ReplaySource
from vime.protocols import DataSource
from vime.rewards import REWARD_NAMES

_PROBE_PROMPTS = 4
_PROBE_TEXTS = ("1 + 1 =", "The capital of France is", "def add(a, b):", "Once upon a time")


def check_data(config: Config) -> CheckedRows | None:
    """Read and check every row of the prompt files, training and held-out.

    Returns: the rows to train on; None where the run has no use for them.
    Raises: DataError, ConfigError.
    """
    names = REWARD_NAMES if modes.generates(config) else None
    rows = check_prompts(config, names) if modes.reads_prompts(config) else None
    if rows is not None:
        check_batch_size(config, len(rows))
    if modes.generates(config):
        for held_out in eval_sets(config):
            keys = RowKeys(
                held_out.input_key,
                held_out.label_key,
                held_out.metadata_key,
                held_out.tool_key,
                held_out.apply_chat_template,
            )
            check_rows([held_out.path], keys, reward_names=names)
    return rows


def build_source(
    config: Config, rows: CheckedRows | None, tokenizer: Any, saved: Mapping[str, Any] | None = None
) -> DataSource:
    """What hands out the run's prompts.

    Args:
        rows: of `check_data`.
        saved: the state that it will be restored from; compared here, so that other data fail early.
    Raises: DataError if prompts cannot be rendered, or are not those of the saved state; ConfigError if a rollout takes
        more prompts than there are; HookError for what the user's class raised.
    """
    if modes.replays(config) or modes.evaluates_without_trainer(config):
        return ReplaySource()
    if config.data.data_source_path is not None:
        return make_own_source(config, tokenizer)
    source = make_buffer(config, None if rows is None else tokenise_prompts(config, rows, tokenizer))
    if saved is not None and not saved.get("replayed"):  # of a run without prompts; the loader says what to do then
        source.check_state(saved)
    return source


def probe_prompts(source: DataSource, tokenizer: Any, max_model_len: int) -> Sequence[Sequence[int]]:
    """Token ids of a few prompts, which the weight sync's probe continues: the run's own, where they are known.

    Args: max_model_len: tokens of prompt and continuation together.
    """
    if isinstance(source, DataBuffer) and len(source.prompts):
        return [prompt.tokens for prompt in source.prompts[:_PROBE_PROMPTS]]
    batch = tokenizer(list(_PROBE_TEXTS), add_special_tokens=False)["input_ids"]
    return [ids[: max_model_len // 2] for ids in batch if ids]
