"""Answers to learn, as token ids: of text, or of the turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.hf import local_checkpoint
from vime.config.parallel import parallel_sizes
from vime.data.chat import chat_kwargs_of, render_chat
from vime.data.conversations import check_answer
from vime.data.turns import Piece, TurnEnds, find_turn_ends, split_turns
from vime.errors import ConfigError
from vime.types import Message


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample as token ids."""

    prompt: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], bool], ...]
    """(ids, whether they are learnt), in order."""
    text: str
    """Of the parts."""

    @property
    def response_length(self) -> int:
        """Tokens behind the prompt."""
        return sum(len(ids) for ids, _ in self.parts)


class Answers:
    """How the rows' answers become samples. Prompts and turns are tokenised apart, as when a model generates them.

    Args:
        tokenizer: a transformers tokenizer.
        stops: tokens at which engines stop, as text, the tokenizer's own first.
        turns: which turns are learnt: "all" or "last".
        chat: whether answers go through the chat template.
        chat_kwargs: for the template; a row's own win.
        max_response_len: tokens behind a prompt.
        max_context_len: tokens of prompt and response.
        max_sample_len: tokens of a sample that one forward pass takes; None: any.
    Raises: ConfigError for a tokenizer whose texts cannot be put together.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stops: Sequence[str],
        turns: str,
        chat: bool,
        chat_kwargs: Mapping[str, Any],
        max_response_len: int,
        max_context_len: int | None,
        max_sample_len: int | None = None,
    ) -> None:
        self.max_sample_len = max_sample_len
        self.may_exceed = max_sample_len is not None and (max_context_len is None or max_sample_len < max_context_len)
        """Whether a sample within the context could be longer than a forward pass takes."""
        self._tokenizer, self._turns, self._chat, self._kwargs = tokenizer, turns, chat, chat_kwargs
        self._max_response, self._max_context = max_response_len, max_context_len
        self.ends = TurnEnds(tuple(stops), {}, None)
        """How turns end."""
        if chat:
            _check_no_prefix(tokenizer)
            special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
            self.ends = find_turn_ends(lambda m, g: self._render(m, g, (), chat_kwargs), stops, special)

    def texts(self, prompt: str | Sequence[Message], label: Any, metadata: Mapping[str, Any]) -> list[Piece]:
        """The samples of one row, as text. Raises: BadRow."""
        check_answer(label, self._turns, "the answer", chat=self._chat)
        if not self._chat:
            return [Piece(None, ((self.ends.cut(label, "user"), True),))]
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer = [{"role": "assistant", "content": label}] if isinstance(label, str) else label
        tools = metadata.get("tools") or ()
        kwargs = chat_kwargs_of(metadata, self._kwargs)
        return split_turns(
            before,
            answer,
            self._turns,
            render=lambda messages, generation_prompt: self._render(messages, generation_prompt, tools, kwargs),
            ends=self.ends,
            tools=tools,
        )

    def tokenise(self, rows: Sequence[tuple[Sequence[int], Sequence[Piece]]]) -> list[list[Answer]]:
        """The samples of several rows, as ids.

        Args: rows: of each the token ids of its own prompt, and its pieces.
        """
        texts = [text for _, pieces in rows for piece in pieces for text in _texts_of(piece)]
        ids = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
        found = []
        for own_prompt, pieces in rows:
            answers = []
            for piece in pieces:
                prompt = own_prompt if piece.prompt is None else next(ids)
                parts = tuple((tuple(next(ids)), learnt) for _, learnt in piece.parts)
                answers.append(Answer(tuple(prompt), parts, "".join(text for text, _ in piece.parts)))
            found.append(answers)
        return found

    def tokens(self, text: str) -> Sequence[int]:
        """The ids of a text that stands alone."""
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def room(self, answer: Answer) -> int:
        """Tokens that may follow its prompt; none or less: it cannot be learnt."""
        if self._max_context is None:
            return self._max_response
        return min(self._max_response, self._max_context - len(answer.prompt))

    def _render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> str:
        if not generation_prompt:
            kwargs = {**kwargs, "add_generation_prompt": False}
        return render_chat(self._tokenizer, messages, tools=tools, kwargs=kwargs)


def make_answers(config: Config, tokenizer: Any) -> Answers:
    """As the run is configured. Raises: ConfigError if nothing would ever end an answer."""
    rollout, data = config.rollout, config.data
    budget = config.train.max_tokens_per_gpu if config.train.use_dynamic_batch_size else None
    checkpoint = config.checkpoint.hf_checkpoint
    return Answers(
        tokenizer,
        stops=stop_tokens(tokenizer, local_checkpoint(checkpoint) if checkpoint else None),
        turns=data.sft_turns,
        chat=data.apply_chat_template,
        chat_kwargs=data.apply_chat_template_kwargs,
        max_response_len=rollout.rollout_max_response_len,
        max_context_len=rollout.rollout_max_context_len,
        max_sample_len=None if budget is None else budget * max(parallel_sizes(config.megatron).context, 1),
    )


def stop_tokens(tokenizer: Any, folder: Path | None) -> list[str]:
    """The tokens at which engines stop by themselves, as text: the tokenizer's, and those of the checkpoint.

    Args: folder: of the checkpoint, for generation_config.json or, without it, config.json, which vLLM reads as well.
    Raises: ConfigError if there are none.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json") if folder is not None else ():
        assert folder is not None
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids += found if isinstance(found, list) else [] if found is None else [found]
            break
    tokens = [token for i in dict.fromkeys(ids) if (token := tokenizer.convert_ids_to_tokens(i))]
    if not tokens:
        raise ConfigError("the tokenizer has no end-of-sequence token, so a response could never be taught to end")
    return tokens


def _texts_of(piece: Piece) -> list[str]:
    return [*([] if piece.prompt is None else [piece.prompt]), *(text for text, _ in piece.parts)]


def _check_no_prefix(tokenizer: Any) -> None:
    """Texts tokenised apart must be those of the whole; a tokenizer that puts a space before each breaks that."""
    (first, *_) = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False)["input_ids"])
    if first.startswith("▁"):
        raise ConfigError(
            "the tokenizer puts a space before every text, so turns cannot be tokenised apart; save it with "
            "add_prefix_space=False (older Llama tokenizers: legacy=False too)"
        )
