"""Prompts as text: the chat template and its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vime.data.bad_row import BadRow
from vime.data.records import CHAT_KWARGS, Record
from vime.types import Message


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Chat messages as the text that the tokenizer's template makes of them.

    Arguments of tool calls that are text, as OpenAI's format has them, are parsed first: templates expect objects.
    Raises: BadRow if they are no JSON; whatever the template raises.
    """
    arguments = {"add_generation_prompt": add_generation_prompt, **(kwargs or {})}
    parsed = [_with_parsed_calls(message) for message in messages]
    text = tokenizer.apply_chat_template(parsed, tools=tools or None, tokenize=False, **arguments)
    return str(text)


def _with_parsed_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed_call(call["function"])}
    if not isinstance(text := call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": json.loads(text) if text.strip() else {}}
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the arguments of the call of {call.get('name')!r} are no JSON ({error})") from error


def chat_kwargs_of(metadata: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template for one row: the run's, and the row's own over them."""
    return {**common, **(metadata.get(CHAT_KWARGS) or {})}


def prompt_text(record: Record, tokenizer: Any, *, chat: bool, kwargs: Mapping[str, Any]) -> str:
    """The text of a row's prompt that is tokenised. Raises: BadRow."""
    text = record.prompt
    if chat:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        try:
            text = render_chat(
                tokenizer,
                messages,
                tools=record.metadata.get("tools"),
                kwargs=chat_kwargs_of(record.metadata, kwargs),
            )
        except Exception as error:  # a template is a program of the checkpoint's author; it may raise anything
            raise BadRow(f"the chat template refuses it: {error}") from error
    assert isinstance(text, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"the text holds half of a surrogate pair at character {error.start}") from error
    return text
