"""The held-out sets of --eval-prompt-data."""

from __future__ import annotations

from typing import Any

from vime.config import Config
from vime.data.prompts import PromptSet, read_prompts
from vime.errors import ConfigError


def load_eval_sets(config: Config, tokenizer: Any) -> dict[str, PromptSet]:
    """Name -> prompts of each held-out set, in the order given; what `generate_rollout(evaluation=True)` takes.

    Keys and chat template are the training data's unless --eval-*-key say otherwise. No prompt is dropped for its
    length: a score over fewer prompts would be another score.
    Raises: ConfigError unless --eval-prompt-data holds pairs of a unique name and a path; DataError for a bad file.
    """
    data, settings = config.data, config.eval
    words = list(settings.eval_prompt_data)
    names = words[::2]
    if len(words) % 2:
        raise ConfigError(f"--eval-prompt-data takes pairs NAME PATH, and got {len(words)} words: {' '.join(words)}")
    if bad := sorted({name for name in names if not name or "/" in name or names.count(name) > 1}):
        raise ConfigError(f"--eval-prompt-data: the names {bad} are used twice or hold a slash; metrics are called so")
    return {
        name: read_prompts(
            path,
            tokenizer,
            input_key=settings.eval_input_key or data.input_key,
            label_key=settings.eval_label_key or data.label_key,
            metadata_key=data.metadata_key,
            tool_key=data.tool_key,
            apply_chat_template=data.apply_chat_template,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            max_context_len=config.rollout.rollout_max_context_len,
        )
        for name, path in zip(names, words[1::2], strict=True)
    }
