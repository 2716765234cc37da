"""One row of a prompt file: what must be there, and what is said when it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vime.config.hooks import load_hook
from vime.data.bad_row import BadRow, kind_of
from vime.data.conversations import check_answer, check_conversation
from vime.types import Message

_DEEPEST = 100
RM_TYPE = "rm_type"
CHAT_KWARGS = "apply_chat_template_kwargs"
GENERATE_PATH = "generate_function_path"
RM_PATH = "custom_rm_path"
"""Keys of a row's metadata that change how this one row is rendered, generated or scored."""

HOOK_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    GENERATE_PATH: ("config", "sample", "sampling_params"),
    RM_PATH: ("config", "sample"),
}


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Where a row keeps what, and whether its prompt goes through the chat template."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"
    chat: bool = False
    answers: str | None = None
    """In supervised training the turns that are learnt, "all" or "last", of the label; without a label of the input,
    which is then a conversation. None: nothing of a row is learnt."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is used of a row."""

    prompt: str | list[Message]
    label: Any
    metadata: dict[str, Any]


def read_record(row: Any, keys: RowKeys) -> Record:
    """The prompt, label and metadata of a parsed row.

    Of a conversation to learn from, the prompt is what precedes the first turn that is learnt; the rest is the label.
    Raises: BadRow.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a JSON object is expected, not {kind_of(row)}")
    for key in (keys.input, keys.label):
        if key is not None and key not in row:
            raise BadRow(f"no key {key!r}; the keys are {sorted(row)}")
    prompt = row[keys.input]
    if isinstance(prompt, list):
        _check_messages(prompt, keys)
    elif not isinstance(prompt, str):
        raise BadRow(f"{keys.input!r} is {kind_of(prompt)}; a string or a list of messages is expected")
    elif not prompt:
        raise BadRow(f"{keys.input!r} is empty")
    else:
        _check_text(prompt, keys)
    label = row[keys.label] if keys.label is not None else None
    if keys.label is not None and label is None:
        raise BadRow(f"{keys.label!r} is null; give it a value, or leave the row out")
    metadata = _object(row, keys.metadata)
    for key, value in ((keys.label, label), (keys.metadata, metadata)):
        _check_value(value, repr(key))
    if tools := _tools(row, keys.tools):
        metadata["tools"] = tools
    if keys.answers is not None and keys.label is None:
        prompt, label = check_conversation(prompt, keys.answers, repr(keys.input))
    elif keys.answers is not None:
        check_answer(label, keys.answers, repr(keys.label), chat=keys.chat)
    return Record(prompt, label, metadata)


def check_overrides(metadata: Mapping[str, Any], *, chat: bool, reward_names: Mapping[str, str | None] | None) -> None:
    """The keys of a row's metadata that vime itself reads.

    Args: reward_names: what rm_type may say, and why this run cannot use it, if so; None where nothing is scored.
    Raises: BadRow.
    """
    name = metadata.get(RM_TYPE)
    if name is not None and reward_names is not None:
        if not (isinstance(name, str) and name in reward_names):
            raise BadRow(f"metadata.{RM_TYPE} is {name!r}; the built-in rewards are {', '.join(sorted(reward_names))}")
        # A function of the row's own may score it, or make what is missing.
        if (problem := reward_names[name]) and not any(metadata.get(key) for key in HOOK_PARAMETERS):
            raise BadRow(f"metadata.{RM_TYPE} is {name!r}, which {problem}")
    kwargs = metadata.get(CHAT_KWARGS)
    if kwargs is not None and not isinstance(kwargs, dict):
        raise BadRow(f"metadata.{CHAT_KWARGS} is {kind_of(kwargs)}; an object is expected")
    if kwargs and not chat:
        raise BadRow(f"metadata.{CHAT_KWARGS} needs --apply-chat-template")
    for key in HOOK_PARAMETERS:
        if metadata.get(key) is not None and not isinstance(metadata[key], str):
            raise BadRow(f"metadata.{key} is {kind_of(metadata[key])}; a dotted path is expected")


def named_hooks(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(metadata key, dotted path) of each function that a row asks for."""
    return ((key, metadata[key]) for key in HOOK_PARAMETERS if metadata.get(key) is not None)


def check_named_hook(key: str, path: str) -> None:
    """Import a function that a row asks for. Raises: ConfigError if it cannot be called as it will be."""
    load_hook(path, HOOK_PARAMETERS[key], is_async=key == GENERATE_PATH)


def _check_messages(messages: list[Any], keys: RowKeys) -> None:
    if not messages:
        raise BadRow(f"{keys.input!r} is an empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"{keys.input!r}[{i}] is no message: an object with a 'role' is expected")
    if not keys.chat:
        raise BadRow(f"{keys.input!r} is a list of messages, which needs --apply-chat-template")


def _check_text(text: str, keys: RowKeys) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"the text holds half of a surrogate pair at character {error.start}") from error
    if keys.chat and text.startswith("[") and _is_messages(text):
        raise BadRow(f"{keys.input!r} is a string that holds messages as JSON; put the list itself there")


def _check_value(value: Any, name: str, depth: int = 0) -> None:
    """Labels and metadata travel as JSON and between processes: refuse what would fail there, amid a run."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(f"{name} holds text with half of a surrogate pair") from error
    elif isinstance(value, dict | list):
        if depth == _DEEPEST:
            raise BadRow(f"{name} is nested more than {_DEEPEST} deep; write it as text")
        for inner in value:
            _check_value(inner, name, depth + 1)
        for inner in value.values() if isinstance(value, dict) else ():
            _check_value(inner, name, depth + 1)


def _is_messages(text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _object(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A row's metadata: an object, or a string that holds one, as Parquet files often do."""
    value = row.get(key)
    if value is None:
        return {}
    if isinstance(value, str):
        value = _json(value, key)
    if not isinstance(value, dict):
        raise BadRow(f"{key!r} is {kind_of(value)}; an object is expected")
    return value


def _tools(row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    tools = row.get(key)
    if isinstance(tools, str) and tools:
        tools = _json(tools, key)
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"{key!r} is {kind_of(tools)}; a list of objects is expected")
    return tools


def _json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{key!r} is a string that is no JSON ({error})") from error
