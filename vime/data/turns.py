"""The assistant's own text in a rendered conversation, turn by turn: what is learnt, and after which prompt.

Chat templates write the same messages in another way once more follow: reasoning of earlier turns goes, neighbouring
tool results become one, system prompts appear by themselves. So nothing is looked for in the rendering of the whole.
For every turn that is learnt the template is asked twice: for the prompt that the model sees when it is its turn, and
for the same conversation with the turn at its end. What the second has more is the model's own. Turns whose prompts
continue each other share a sample; where a prompt does not begin with what came before, a new sample begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vime.data.bad_row import BadRow
from vime.data.conversations import function_name, learnt_turns, without_weights
from vime.errors import DataError
from vime.types import Message

Render: TypeAlias = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text."""

_PROBE = "probe of a turn's end"  # said by the assistant where only what comes after it is of interest
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one sample: a prompt, then parts that are learnt and, between them, parts that are not."""

    prompt: str | None
    """None: the prompt of the row as it is."""
    parts: tuple[tuple[str, bool], ...]
    """(text, whether it is learnt), in order; the first and the last are."""
    left_out: tuple[str, ...] = ()
    """What the template does not write of the turns learnt: "content" or "reasoning", once for each turn."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """How a turn of the assistant ends in token text, so that a model learns to stop.

    Every turn that is learnt ends in one token that stops generation; what a template writes behind it (a line break,
    most of all) is never sampled and never learnt.
    """

    stops: tuple[str, ...]
    """Tokens at which engines stop by themselves; the first is the tokenizer's end-of-sequence token."""
    opening: Mapping[str, str]
    """Role of the next message -> the stop token that this message begins with, where turns have no end of their own
    (GLM)."""
    closing: str | None
    """The special token that ends turns, if none of `stops` does."""

    def cut(self, said: str, next_role: str) -> str:
        """A turn's text up to its end, or with one. Raises: BadRow if it holds such a token before its end."""
        found = [(said.find(stop), stop) for stop in self.stops if stop in said]
        if found:
            start, stop = min(found)
            own, rest = said[: start + len(stop)], said[start + len(stop) :]
            for other in self.stops:
                rest = rest.replace(other, "")
            if rest.strip():
                raise BadRow(f"an assistant's message holds {stop!r}, which ends a turn, before its end")
            return own
        if next_role in self.opening:
            return said + self.opening[next_role]
        if self.closing is not None and self.closing in said:
            return said[: said.rindex(self.closing) + len(self.closing)]
        return said + self.stops[0]


def find_turn_ends(render: Render, stops: Sequence[str], special: Sequence[str]) -> TurnEnds:
    """Ask a template how it ends the assistant's turns.

    Args:
        stops: tokens at which engines stop, as text.
        special: all special tokens of the tokenizer.
    """
    opening = {}
    for role in ("user", "tool"):
        after = _after_probe(render, {"role": role, "content": "x"})
        if after is not None and (stop := next((s for s in stops if after.startswith(s)), None)):
            opening[role] = stop
    closing = None
    after = _after_probe(render)
    if after and not any(stop in after for stop in stops):
        found = [(after.find(token), token) for token in special if token and token in after]
        closing = min(found)[1] if found else None
    return TurnEnds(tuple(stops), opening, closing)


def _after_probe(render: Render, *following: Message) -> str | None:
    """The text behind what the assistant said; None if the template refuses such a conversation."""
    try:
        text = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}, *following], False)
    except Exception:  # a template is a program of the checkpoint's author; it may raise anything
        return None
    _, found, after = text.partition(_PROBE)
    return after if found else None


def text_between_turns(render: Render, messages: Sequence[Message], stops: Sequence[str]) -> str:
    """What stands between the token that ended a turn of the assistant and the next turn, which is then opened.

    For generation in several turns: the tokens sampled stay as they are, and what this text gives is appended.

    Args:
        messages: what comes between the two turns: a tool's results, or a user's words.
        stops: tokens at which engines stop, as text; the sampled turn ended in the one that the template has there.
    Raises: DataError if the template refuses, or ends the turn in none of them.
    """
    try:
        text = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}, *messages], True)
    except Exception as error:  # as above
        raise DataError(f"the chat template refuses {messages}: {error}") from error
    _, _, after = text.partition(_PROBE)
    stop = next((stop for stop in stops if after.startswith(stop)), None)
    if stop is None:
        raise DataError(f"the chat template ends the assistant's turn in {after[:20]!r}, and generation at {stops}")
    return after[len(stop) :]


def split_turns(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    turns: str,
    *,
    render: Render,
    ends: TurnEnds,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Piece]:
    """A conversation as samples.

    Args:
        prompt: messages of which nothing is learnt.
        answer: the messages that follow them.
        turns: which of the assistant's are learnt, as `learnt_turns` takes it.
        tools: definitions that `render` hands to the template.
    Raises: BadRow for a conversation that the template refuses or does not write whole, or whose prompt it writes in
        another way when an answer follows.
    """
    messages = [without_weights(message) for message in (*prompt, *answer)]
    pieces: list[Piece] = []
    text: str | None = None  # of the piece so far, with its prompt
    for k in learnt_turns(answer, turns, is_answer=True):
        i = len(prompt) + k
        before = _rendered(render, messages[:i], True)
        whole = _rendered(render, messages[: i + 1], False)
        if not whole.startswith(before):
            raise BadRow(
                f"the chat template writes the prompt differently when message {i} follows as its answer, so the model "
                "would be trained on a prompt it never sees (a prompt that closes the reasoning, and an answer that "
                "has some?); change the message, or give the answer as text and render it yourself"
            )
        own = ends.cut(whole[len(before) :], _next_role(messages, i))
        if text is None:
            _check_tools(tools, before)
        _check_said(messages[i], own, i)
        left_out = tuple(_left_out(messages[i], own))
        if text is not None and before.startswith(text):
            last = pieces.pop()
            parts = (*last.parts, (before[len(text) :], False), (own, True))
            pieces.append(Piece(last.prompt, parts, (*last.left_out, *left_out)))
        else:
            pieces.append(Piece(before if k else None, ((own, True),), left_out))
        text = before + own
    return pieces


def _rendered(render: Render, messages: Sequence[Message], generation_prompt: bool) -> str:
    try:
        return render(messages, generation_prompt)
    except Exception as error:  # as above
        raise BadRow(f"the chat template refuses its first {len(messages)} messages: {error}") from error


def _next_role(messages: Sequence[Message], i: int) -> str:
    """Of the message behind the i-th, or who would speak then."""
    if i + 1 < len(messages):
        return str(messages[i + 1]["role"])
    return "tool" if messages[i].get("tool_calls") else "user"


def _check_tools(tools: Sequence[Mapping[str, Any]], prompt: str) -> None:
    for tool in tools:
        name = function_name(tool)
        if name and name not in prompt:
            raise BadRow(
                f"the chat template does not show the tool {name!r}; describe it in a message and leave the "
                "definitions out, or use another template"
            )


def _check_said(message: Message, own: str, i: int) -> None:
    calls, texts = message.get("tool_calls") or [], _says(message)
    if texts and not calls and not any(text in own for text in texts):
        raise BadRow(f"the chat template does not write what the assistant says in message {i}")
    for call in calls:
        name = function_name(call)
        if name not in own:
            raise BadRow(
                f"the chat template does not write the call of {name!r} in message {i}; write calls into the content, "
                "or use another template"
            )
    is_null = "content" in message and message["content"] is None
    if calls and is_null and "None" in own.split(function_name(calls[0]))[0]:
        raise BadRow(f"message {i} has the content null, which the chat template writes as 'None'; put \"\" there")


def _says(message: Message) -> list[str]:
    """The texts of its content; of one that holds its reasoning as well, what follows that: templates take it apart."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [p.get("text") for p in content or [] if isinstance(p, dict)]
    spoken = (text.rpartition("</think>")[2].strip() for text in texts if isinstance(text, str))
    return [text for text in spoken if text]


def _left_out(message: Message, own: str) -> Iterator[str]:
    """What the template drops of a turn."""
    if any(text not in own for text in _says(message)):
        yield "content"
    thoughts = [message[key].strip() for key in _REASONING_KEYS if isinstance(message.get(key), str)]
    if any(text not in own for text in thoughts):
        yield "reasoning"
