"""The data source of a run: files checked before anything starts, the source built while the engines start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.config import Config, modes
from vime.config.eval_sets import EvalSet, eval_sets
from vime.data.bad_row import BadRow
from vime.data.buffer import DataBuffer
from vime.data.journaled import JournaledSource
from vime.data.prompts import CheckedRows, check_prompts, check_rows, tokenise_prompts
from vime.data.records import check_named_hook, check_overrides, named_hooks
from vime.data.source import check_batch_size, make_buffer, make_own_source
from vime.errors import ConfigError
from vime.loop.replay import NoPrompts
from vime.protocols import DataSource
from vime.rewards.score import reward_key_problem, usable_rewards
from vime.rollout.eval_data import held_out_keys

_PROBE_PROMPTS = 4
_PROBE_TEXTS = ("1 + 1 =", "The capital of France is", "def add(a, b):", "Once upon a time")


def check_data(config: Config) -> CheckedRows | None:
    """Read and check every row of the prompt files, training and held-out.

    Returns: the rows to train on; None where the run has no use for them.
    Raises: DataError, ConfigError.
    """
    generates = modes.generates(config)
    rows = None
    if modes.reads_prompts(config):
        if generates and (problem := reward_key_problem(config.reward, config.reward.reward_key)):
            raise ConfigError(f"the reward {problem}")
        rows = check_prompts(config, _rewards_of_rows(config) if generates else None)
        check_batch_size(config, len(rows))
    for held_out in eval_sets(config) if generates else ():
        _check_held_out(config, held_out)
    return rows


def _rewards_of_rows(config: Config) -> Mapping[str, str | None]:
    rollout = config.rollout
    has_label = config.data.label_key is not None or _users_code_runs(
        config, rollout.rollout_function_path, rollout.custom_generate_function_path
    )
    return usable_rewards(config.reward, reward_key=config.reward.reward_key, has_label=has_label)


def _users_code_runs(config: Config, rollout_function: str, generate_function: str | None) -> bool:
    """Whether a function of the user's sees samples before their reward, and may give them what they lack."""
    is_own = not rollout_function.startswith("vime.")
    return is_own or generate_function is not None or bool(config.rollout.rollout_sample_hook_path)


def _check_held_out(config: Config, held_out: EvalSet) -> None:
    """The rows of a held-out set, and what scores them. Raises: DataError, ConfigError."""
    function = config.rollout.eval_function_path or config.rollout.rollout_function_path
    has_label = held_out.label_key is not None or _users_code_runs(
        config, function, held_out.custom_generate_function_path
    )
    names = usable_rewards(config.reward, reward_key=held_out.reward_key, has_label=has_label)
    if held_out.rm_type is not None:
        problem = names[held_out.rm_type]
    else:
        problem = reward_key_problem(config.reward, held_out.reward_key)
    if problem:
        named = f"rm_type {held_out.rm_type}" if held_out.rm_type is not None else "the run's reward"
        raise ConfigError(f"held-out set {held_out.name}: {named} {problem}")
    keys = held_out_keys(held_out)
    # The set's rm_type goes before a row's own.
    rows_names = names if held_out.rm_type is None else dict.fromkeys(names)
    try:
        check_overrides(held_out.metadata_overrides, chat=keys.chat, reward_names=rows_names)
        for key, path in named_hooks(held_out.metadata_overrides):
            check_named_hook(key, path)
    except (BadRow, ConfigError) as error:
        raise ConfigError(f"held-out set {held_out.name}: metadata_overrides: {error}") from error
    check_rows([held_out.path], keys, reward_names=rows_names)


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
        return NoPrompts()
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
    source = source.source if isinstance(source, JournaledSource) else source
    if isinstance(source, DataBuffer) and len(source.prompts):
        return [prompt.tokens for prompt in source.prompts[:_PROBE_PROMPTS]]
    batch = tokenizer(list(_PROBE_TEXTS), add_special_tokens=False)["input_ids"]
    return [ids[: max_model_len // 2] for ids in batch if ids]
