"""The held-out sets of --eval-prompt-data and --eval-config, read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime.config import Config
from vime.config.eval_sets import EvalSet, eval_sets
from vime.data.prompt_set import Prompt, PromptSet
from vime.data.prompts import check_rows
from vime.data.records import RowKeys
from vime.errors import DataError


class HeldOutSet(Sequence[Prompt]):
    """The prompts of one held-out set, and in `settings` how they are to be sampled and scored."""

    def __init__(self, settings: EvalSet, prompts: PromptSet) -> None:
        self.settings = settings
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    @property
    def num_dropped(self) -> int:
        """Prompts left out because they were longer than the set's limit."""
        return self._prompts.num_dropped


def load_eval_sets(config: Config, tokenizer: Any) -> dict[str, HeldOutSet]:
    """Name -> held-out set, in the order given; what `generate_rollout(evaluation=True)` takes.

    No prompt is dropped for its length but by a limit of the set's own: a score over fewer prompts would be another
    score, so --rollout-max-prompt-len says nothing here.
    Raises: ConfigError as `eval_sets`; DataError for a bad file.
    """
    return {held_out.name: HeldOutSet(held_out, _read(held_out, tokenizer)) for held_out in eval_sets(config)}


def held_out_keys(held_out: EvalSet) -> RowKeys:
    """How the set's rows are read."""
    return RowKeys(
        held_out.input_key,
        held_out.label_key,
        held_out.metadata_key,
        held_out.tool_key,
        held_out.apply_chat_template,
    )


def _read(held_out: EvalSet, tokenizer: Any) -> PromptSet:
    prompts = check_rows([held_out.path], held_out_keys(held_out)).tokenise(
        tokenizer,
        chat_kwargs=held_out.apply_chat_template_kwargs,
        max_prompt_len=held_out.max_prompt_len,
        max_context_len=held_out.max_context_len,
    )
    if prompts.num_over_context:
        raise DataError(
            f"held-out set {held_out.name}: {prompts.num_over_context} prompts of {held_out.path} leave no room for a "
            f"response in a context of {held_out.max_context_len} tokens; allow a longer one, or leave them out by "
            "--eval-max-prompt-len"
        )
    return prompts
