"""Chat formats of four model families, with tokenizers over bytes that know each family's special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.data.answers import Answers

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Format:
    """A family's special tokens; the first of `stops` is the tokenizer's end-of-sequence token."""

    stops: tuple[str, ...]
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    """Tokens of their own that are not special."""


_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FORMATS = {
    "qwen3": Format(("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",), _THINK),
    "glm4_moe": Format(
        ("<|endoftext|>", "<|user|>", "<|observation|>"), ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"), _THINK
    ),
    "llama3": Format(
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "smollm2": Format(("<|im_end|>",), ("<|im_start|>",)),
}


def tokenizer_of(family: str) -> Any:
    """A real transformers tokenizer: bytes, line breaks merged as the families' own do, the family's tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    form = FORMATS[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ", "ĊĊĊ", "ab"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*form.stops, *form.special)])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in form.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=form.stops[0],
        bos_token="<|begin_of_text|>" if family == "llama3" else None,
        additional_special_tokens=list(form.special),
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


def answers_of(tokenizer: Any, family: str, *, turns: str = "all", **kwargs: Any) -> Answers:
    """As a run over the family's checkpoint makes them."""
    settings: dict[str, Any] = {"max_response_len": 10_000, "max_context_len": None} | {
        key: kwargs.pop(key) for key in ("max_response_len", "max_context_len") if key in kwargs
    }
    return Answers(tokenizer, stops=FORMATS[family].stops, turns=turns, chat=True, chat_kwargs=kwargs, **settings)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def says(content: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def call(name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def first_said(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the assistant's first message."""
    return next(i for i, message in enumerate(messages) if message["role"] == "assistant")
