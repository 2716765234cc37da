"""Read a JSONL file of prompts: every line checked, every prompt tokenised once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from vime.errors import DataError
from vime.types import Message

if TYPE_CHECKING:
    from vime.config import Config

logger = logging.getLogger(__name__)

_TOKENISE_AT_ONCE = 1024  # texts handed to the tokenizer in one call: enough to use its threads, bounded memory
_SHOWN = 5  # bad lines spelled out in an error; the rest are counted


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the buffer hands it out."""

    prompt: str | list[Message]
    """What the file held."""
    tokens: tuple[int, ...]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """The file's metadata object; `tools`, where the line had them, are kept under that key."""


class PromptSet(Sequence[Prompt]):
    """The prompts of one file: flat token ids and the raw lines, so that a million prompts stay compact.

    A line is parsed again when its prompt is asked for (tens of microseconds); its text is never tokenised again.
    """

    def __init__(
        self, path: Path, keys: _Keys, lines: list[bytes], tokens: Sequence[npt.NDArray[np.int32]], dropped: int
    ) -> None:
        self.path = path
        self.num_dropped = dropped
        """Prompts left out because they were longer than the limit."""
        self._keys = keys
        self._lines = lines
        self._offsets = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum([len(t) for t in tokens], out=self._offsets[1:])
        self._tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        index %= len(self)
        record = _read_record(self._lines[index], self._keys)
        ids = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        return Prompt(record.prompt, tuple(ids.tolist()), record.label, record.metadata)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[len(self)] prompt tokens."""
        return np.diff(self._offsets)

    def fingerprint(self) -> str:
        """Names the content: the lines, how they are read, and the token ids. Equal fingerprints, equal prompts."""
        digest = hashlib.blake2b(repr(self._keys).encode(), digest_size=16)
        for line in self._lines:
            digest.update(line + b"\n")
        digest.update(self._offsets.tobytes())
        digest.update(self._tokens.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where a line keeps what."""

    input: str
    label: str | None
    metadata: str
    tools: str
    chat: bool


@dataclass(frozen=True, slots=True)
class _Record:
    prompt: str | list[Message]
    label: Any
    metadata: dict[str, Any]


class _BadLine(Exception):
    """Why one line cannot be used."""


def load_prompts(config: Config, tokenizer: Any) -> PromptSet:
    """The training prompts of `--prompt-data`, read as the data section says. Raises: DataError."""
    data = config.data
    if data.prompt_data is None:
        raise DataError("no --prompt-data is given: name a JSONL file of prompts")
    return read_prompts(
        data.prompt_data,
        tokenizer,
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        max_prompt_len=data.rollout_max_prompt_len,
        max_context_len=config.rollout.rollout_max_context_len,
    )


def read_prompts(
    path: str | Path,
    tokenizer: Any,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    metadata_key: str = "metadata",
    tool_key: str = "tools",
    apply_chat_template: bool = False,
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_len: int | None = None,
    max_context_len: int | None = None,
) -> PromptSet:
    """The prompts of a JSONL file, validated and tokenised.

    A prompt is a string, or a list of chat messages; messages need `apply_chat_template`, and with it a string is one
    user message. Text is tokenised as it stands: no special tokens are added, since a template writes its own.

    Args:
        path: UTF-8, one JSON object a line; blank lines are skipped.
        tokenizer: a transformers tokenizer.
        max_prompt_len: prompts of more tokens are dropped and counted (`PromptSet.num_dropped`, and a warning).
        max_context_len: tokens prompt and response may have together; a prompt that leaves no room is an error.
    Raises: DataError naming the file, the first bad lines with what is wrong, and how many there are.
    """
    path = Path(path)
    keys = _Keys(input_key, label_key, metadata_key, tool_key, apply_chat_template)
    kwargs = dict(apply_chat_template_kwargs or {})
    lines: list[bytes] = []
    numbers: list[int] = []
    texts: list[str] = []
    tokens: list[npt.NDArray[np.int32]] = []
    problems: list[str] = []

    def tokenise() -> None:
        if texts:
            batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
            tokens.extend(np.asarray(ids, np.int32) for ids in batch)
            texts.clear()

    num_lines = 0
    for number, line in _numbered_lines(path):
        num_lines += 1
        try:
            record = _read_record(line, keys)
            text = _prompt_text(record, tokenizer, chat=apply_chat_template, kwargs=kwargs)
        except _BadLine as problem:
            problems.append(f"line {number}: {problem}")
            continue
        lines.append(line)
        numbers.append(number)
        texts.append(text)
        if len(texts) == _TOKENISE_AT_ONCE:
            tokenise()
    tokenise()
    problems += [f"line {n}: the prompt has no tokens" for n, ids in zip(numbers, tokens, strict=True) if not len(ids)]
    if problems:
        _refuse(path, f"{len(problems)} of {num_lines} lines cannot be used", problems)
    return _within_limits(path, keys, numbers, lines, tokens, max_prompt_len, max_context_len)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Chat messages as the text that the tokenizer's template makes of them."""
    arguments = {"add_generation_prompt": add_generation_prompt, **(kwargs or {})}
    text = tokenizer.apply_chat_template(list(messages), tools=tools or None, tokenize=False, **arguments)
    return str(text)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, raw line) of every line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"cannot read the prompts in {path}: {error.strerror or error}") from error


def _read_record(line: bytes, keys: _Keys) -> _Record:
    """Raises: _BadLine."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise _BadLine("nested too deeply") from error
    except ValueError as error:
        raise _BadLine(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _BadLine(f"a JSON object is expected, not {_kind(record)}")
    for key in (keys.input, keys.label):
        if key is not None and key not in record:
            raise _BadLine(f"no key {key!r}; the keys are {sorted(record)}")
    prompt = record[keys.input]
    if isinstance(prompt, list):
        _check_messages(prompt, keys)
    elif not isinstance(prompt, str):
        raise _BadLine(f"{keys.input!r} is {_kind(prompt)}; a string or a list of messages is expected")
    elif not prompt:
        raise _BadLine(f"{keys.input!r} is empty")
    metadata = record.get(keys.metadata)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise _BadLine(f"{keys.metadata!r} is {_kind(metadata)}; an object is expected")
    tools = record.get(keys.tools)
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise _BadLine(f"{keys.tools!r} is {_kind(tools)}; a list of objects is expected")
        metadata["tools"] = tools
    return _Record(prompt, record[keys.label] if keys.label is not None else None, metadata)


def _check_messages(messages: list[Any], keys: _Keys) -> None:
    if not messages:
        raise _BadLine(f"{keys.input!r} is an empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadLine(f"{keys.input!r}[{i}] is no message: an object with a 'role' is expected")
    if not keys.chat:
        raise _BadLine(f"{keys.input!r} is a list of messages, which needs --apply-chat-template")


def _prompt_text(record: _Record, tokenizer: Any, *, chat: bool, kwargs: Mapping[str, Any]) -> str:
    """What is tokenised. Raises: _BadLine."""
    text = record.prompt
    if chat:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        try:
            text = render_chat(tokenizer, messages, tools=record.metadata.get("tools"), kwargs=kwargs)
        except Exception as error:  # a template is a program of the checkpoint's author; it may raise anything
            raise _BadLine(f"the chat template refuses it: {error}") from error
    assert isinstance(text, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadLine(f"the text holds half of a surrogate pair at character {error.start}") from error
    return text


def _within_limits(
    path: Path,
    keys: _Keys,
    numbers: Sequence[int],
    lines: list[bytes],
    tokens: list[npt.NDArray[np.int32]],
    max_prompt_len: int | None,
    max_context_len: int | None,
) -> PromptSet:
    if not lines:
        raise DataError(f"{path} holds no prompts")
    longest = max(len(ids) for ids in tokens)
    keep = [i for i, ids in enumerate(tokens) if max_prompt_len is None or len(ids) <= max_prompt_len]
    if not keep:
        raise DataError(
            f"{path}: all {len(lines)} prompts are longer than --rollout-max-prompt-len {max_prompt_len}; "
            f"the shortest has {min(len(ids) for ids in tokens)} tokens"
        )
    if dropped := len(lines) - len(keep):
        logger.warning(
            "%s: %d of %d prompts are left out: longer than --rollout-max-prompt-len %d (the longest has %d tokens)",
            path,
            dropped,
            len(lines),
            max_prompt_len,
            longest,
        )
    if max_context_len is not None:
        full = [i for i in keep if len(tokens[i]) >= max_context_len]
        if full:
            _refuse(
                path,
                f"{len(full)} of {len(keep)} prompts leave no room for a response in --rollout-max-context-len "
                f"{max_context_len}; give --rollout-max-prompt-len to leave them out, or allow a longer context",
                [f"line {numbers[i]}: {len(tokens[i])} tokens" for i in full],
            )
    return PromptSet(path, keys, [lines[i] for i in keep], [tokens[i] for i in keep], dropped)


def _refuse(path: Path, summary: str, problems: Sequence[str]) -> NoReturn:
    more = [f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise DataError("\n  ".join([f"{path}: {summary}", *problems[:_SHOWN], *more]))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
