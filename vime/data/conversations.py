"""Conversations to learn from: what a list of messages must be, and which of the assistant's turns are learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vime.data.bad_row import BadRow, kind_of
from vime.types import Message

ASSISTANT = "assistant"
WEIGHT_KEYS = ("weight", "train", "step_loss_mask")
"""Keys of a message that say whether it is learnt, as data for other programs have them: 1 or true, 0 or false."""


def check_conversation(messages: Any, turns: str, what: str) -> tuple[list[Message], list[Message]]:
    """The messages before the first turn that is learnt, and those from it on. Raises: BadRow."""
    checked = check_messages(messages, what)
    first = learnt_turns(checked, turns)[0]
    return checked[:first], checked[first:]


def check_answer(label: Any, turns: str, what: str, *, chat: bool) -> None:
    """Whether a label is an answer to learn: text or, with a chat template, messages. Raises: BadRow."""
    if isinstance(label, str) and label:
        return
    if isinstance(label, list) and label and not chat:
        raise BadRow(f"{what} is a list of messages, which needs --apply-chat-template")
    if not isinstance(label, list) or not label:
        found = "empty" if label in ("", []) else kind_of(label)
        raise BadRow(f"{what} is {found}; supervised training needs an answer as text or as a list of messages")
    learnt_turns(check_messages(label, what), turns, is_answer=True)


def check_messages(messages: Any, what: str) -> list[Message]:
    """The value, if it is a conversation: objects with a role, the assistant's with something said, weights 0 or 1.

    Args: what: names the value in errors, such as "'messages'".
    Raises: BadRow.
    """
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else kind_of(messages)
        raise BadRow(f"{what} is {found}; a list of messages is expected")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"{what}[{i}] is no message: an object with a 'role' is expected")
        if problem := next(_problems(message), None):
            raise BadRow(f"{what}[{i}], of the role {message['role']}, {problem}")
    return messages


def learnt_turns(messages: Sequence[Message], turns: str, *, is_answer: bool = False) -> list[int]:
    """Which of the messages are learnt, by index.

    Args:
        messages: that `check_messages` takes.
        turns: "all" of the assistant's messages, or the "last" of them; without those whose weight is 0.
        is_answer: the messages follow a prompt of their own.
    Raises: BadRow if none is, or the first has nothing before it.
    """
    said = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not said:
        roles = sorted({message["role"] for message in messages})
        raise BadRow(f"holds nothing to learn: no message has the role 'assistant', the roles are {roles}")
    chosen = said[-1:] if turns == "last" else said
    learnt = [i for i in chosen if weight_of(messages[i]) != 0]
    if not learnt:
        raise BadRow(f"holds nothing to learn: the weight of each assistant's message that counts ({turns}) is 0")
    if learnt[0] == 0 and not is_answer:
        raise BadRow(
            "begins with the assistant, and what nothing precedes cannot be learnt; give that message the weight 0, or "
            "put a prompt before it"
        )
    return learnt


def weight_of(message: Message) -> int | None:
    """0 or 1, as the message says; None if it does not."""
    return next((int(message[key]) for key in WEIGHT_KEYS if message.get(key) is not None), None)


def without_weights(message: Message) -> Message:
    """The message as a chat template should see it."""
    return {key: value for key, value in message.items() if key not in WEIGHT_KEYS}


def function_name(tool: Mapping[str, Any]) -> str:
    """Of a tool's definition or of a call; empty if it has none."""
    inner = tool.get("function")
    name = (inner if isinstance(inner, Mapping) else tool).get("name")
    return name if isinstance(name, str) else ""


def _problems(message: Message) -> Iterator[str]:
    given = {key: message[key] for key in WEIGHT_KEYS if message.get(key) is not None}
    for key, value in given.items():
        if value not in (0, 1):  # True and False are among these
            yield f"has the {key} {value!r}; a message is learnt (1) or not (0)"
    if len({int(value) for value in given.values()}) > 1:
        yield f"has the weights {given}, which contradict each other"
    if message["role"] != ASSISTANT:
        if any(given.values()):
            key = next(key for key, value in given.items() if value)
            yield f"has the {key} {given[key]!r}, but only the assistant's messages can be learnt"
        return
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        yield f"has tool_calls that are {kind_of(calls)}; a list of objects is expected"
    if any(not function_name(call) for call in calls or ()):
        yield "calls a tool without naming it: a call is an object with a 'function' that has a 'name'"
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        yield f"has content that is {kind_of(content)}; text is expected"
    if not content and not calls:
        yield "says nothing: it has neither content nor tool_calls"
