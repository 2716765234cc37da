"""Conversations as data: what is refused, and which turns are learnt."""

from __future__ import annotations

from typing import Any

import pytest

from vime.data.bad_row import BadRow
from vime.data.conversations import check_answer, check_conversation, check_messages, learnt_turns

U: dict[str, Any] = {"role": "user", "content": "u"}
A: dict[str, Any] = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("text", r"'m' is a string; a list of messages is expected"),
        ([], "'m' is an empty list"),
        ([U, "hi"], r"'m'\[1\] is no message"),
        ([U, {"content": "x"}], r"'m'\[1\] is no message"),
        ([U, {"role": "assistant"}], r"'m'\[1\], of the role assistant, says nothing"),
        ([U, {"role": "assistant", "content": "", "tool_calls": []}], "says nothing"),
        ([U, {"role": "assistant", "content": 3}], "has content that is a number"),
        ([U, {"role": "assistant", "tool_calls": {"name": "x"}}], "has tool_calls that are an object"),
        ([U, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "calls a tool without naming it"),
        ([U, A | {"weight": 0.5}], "has the weight 0.5; a message is learnt"),
        ([U, A | {"train": "no"}], "has the train 'no'"),
        ([U, A | {"weight": 1, "train": False}], "contradict each other"),
        ([U | {"weight": 1}, A], r"'m'\[0\], of the role user, has the weight 1, but only the assistant's"),
    ],
)
def test_what_is_no_conversation_is_named(messages: Any, problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        check_messages(messages, "'m'")


def test_turns_to_learn() -> None:
    talk = [U, A, U, A | {"weight": 0}, U | {"weight": 0}, A | {"train": True}, U]
    assert learnt_turns(talk, "all") == [1, 5]
    assert learnt_turns(talk, "last") == [5]
    assert learnt_turns([A, U, A], "all", is_answer=True) == [0, 2]
    assert learnt_turns([A | {"step_loss_mask": 0}, U, A], "all") == [2]


@pytest.mark.parametrize(
    ("messages", "turns", "problem"),
    [
        (
            [U, {"role": "gpt", "content": "x"}],
            "all",
            r"no message has the role 'assistant', the roles are \['gpt', 'us",
        ),
        ([U, A | {"weight": 0}], "all", "the weight of each assistant's message that counts"),
        ([U, A, U, A | {"weight": 0}], "last", r"counts \(last\) is 0"),
        ([A, U, A], "all", "begins with the assistant"),
    ],
)
def test_conversations_with_nothing_to_learn_are_refused(messages: Any, turns: str, problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        learnt_turns(messages, turns)


def test_a_conversation_is_cut_before_the_first_turn_that_is_learnt() -> None:
    talk = [U, A | {"weight": 0}, U, A, U, A]
    assert check_conversation(talk, "all", "m") == (talk[:3], talk[3:])
    assert check_conversation(talk, "last", "m") == (talk[:5], talk[5:])


@pytest.mark.parametrize(
    ("label", "problem"),
    [(None, "is null"), ("", "is empty"), ([], "is empty"), (4, "is a number"), ([U], "no message has the role")],
)
def test_labels_that_are_no_answer_are_named(label: Any, problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        check_answer(label, "all", "'answer'", chat=True)
    check_answer("text", "all", "'answer'", chat=False)
    check_answer([A], "all", "'answer'", chat=True)
    with pytest.raises(BadRow, match="needs --apply-chat-template"):
        check_answer([A], "all", "'answer'", chat=False)
