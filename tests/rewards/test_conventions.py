"""Graders that follow a published convention, on cases of their own.

Sources: dapo: the prompt and scoring of arXiv:2503.14476 ("Answer:" on the last line, +1/-1). f1: the definitions of
SQuAD, arXiv:1606.05250, section 6.1, computed by hand. deepscaler: reasoning, then a box. multiple_choice: phrases that
models use, and sentences that only look like a choice.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.rewards import REWARDS, Grade

CITIES = {"choices": ["Paris", "Rome", "Bern", "Oslo"]}


def grade(name: str, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Grade:
    return REWARDS[name].grade(response, label, metadata or {})


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        ("Therefore\nAnswer: 34", "34", "correct"),
        ("Answer: $34$", "34", "correct"),
        (r"Answer: \boxed{34}", "34", "correct"),
        (r"Final Answer: $\boxed{34}$.", "34", "correct"),
        (r"Answer: \(34\).", "34", "correct"),
        ("**Answer:** 34", "34", "correct"),
        ("Answer: **34**", "34", "correct"),
        ("answer :\n\n34", "34", "correct"),
        ("Answer: 1,000", "1000", "correct"),
        (r"Answer: \frac12", "0.5", "correct"),
        ("Answer: 3\nNo.\nAnswer: 4", "3", "wrong"),
        ("Answer: 34\nI am sure.", "34", "correct"),
        ("Answer: 341", "34", "wrong"),
        ("The answer is 34", "34", "unparseable"),
        ("Answer:", "34", "unparseable"),
        ("Answer: ", "34", "unparseable"),
        ("<think>Answer: 34</think>It is 34.", "34", "unparseable"),
        ("Answer: 4", ["3", "4"], "correct"),
        ("", "34", "unparseable"),
    ],
)
def test_dapo(response: str, label: Any, verdict: str) -> None:
    got = grade("dapo", response, label)
    assert got.verdict == verdict
    acc = float(verdict == "correct")
    assert got == Grade(2 * acc - 1, got.verdict, {"score": 2 * acc - 1, "acc": acc})


def test_a_failing_grader_costs_as_much_as_a_wrong_answer() -> None:
    assert REWARDS["dapo"].failure("timeout") == Grade(-1.0, "timeout", {"score": -1.0, "acc": 0.0})
    assert REWARDS["math"].failure("crashed") == Grade(0.0, "crashed")


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        (r"<think>\boxed{3}</think> It is \boxed{4}.", "4", "correct"),
        (r"<think>\boxed{4}</think> It is 4.", "4", "unparseable"),
        (r"\boxed{4}", "4", "unparseable"),
        (r"<think>\boxed{4}", "4", "unparseable"),
        (r"thoughts ###Response \boxed{4}", "4", "correct"),
        (r"<think>x</think>\boxed{0.5}", r"so \boxed{\frac{1}{2}}", "correct"),
        (r"<think>x</think>\boxed{5}", ["4", r"\boxed{5}"], "correct"),
        (r"<think>x</think>\boxed{6}", ["4", "5"], "wrong"),
    ],
)
def test_deepscaler(response: str, label: Any, verdict: str) -> None:
    assert grade("deepscaler", response, label).verdict == verdict


@pytest.mark.parametrize(
    ("response", "label", "score", "verdict"),
    [
        ("The cat sat on the mat.", "a cat on mat", 6 / 7, "wrong"),  # 3 common of 4 and 3: p 3/4, r 1
        ("cat cat dog", "cat", 0.5, "wrong"),  # p 1/3, r 1
        ("Paris", "the PARIS!", 1.0, "correct"),
        ("It is in Rome", "Oslo", 0.0, "wrong"),
        ("Oslo", ["Rome", "Oslo city"], 2 / 3, "wrong"),
        ("<think>Oslo Oslo</think>Oslo", "Oslo", 1.0, "correct"),
        ("", "Oslo", 0.0, "unparseable"),
        ("the", "Oslo", 0.0, "unparseable"),
        ("", "", 1.0, "correct"),  # SQuAD 2: the question has no answer
        ("Oslo", "", 0.0, "wrong"),
        ("3.14", 3.14, 1.0, "correct"),
    ],
)
def test_f1(response: str, label: Any, score: float, verdict: str) -> None:
    got = grade("f1", response, label)
    assert got.score == pytest.approx(score)
    assert got.verdict == verdict


def test_boxed_graders_see_the_box_alone() -> None:
    assert grade("boxed_f1", r"Long talk, \boxed{Oslo} it is", "Oslo").score == 1.0
    assert grade("boxed_exact_match", r"\boxed{4}", "4").verdict == "correct"
    assert grade("boxed_gpqa", r"\boxed{C}", "C").verdict == "correct"
    assert grade("boxed_multiple_choice", "Answer: C", "C").verdict == "unparseable"


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("C", "C"),
        ("(C)", "C"),
        ("c)", "C"),
        ("The answer is (C).", "C"),
        ("The answer is C because A is too small.", "C"),
        ("The correct answer is option B.", "B"),
        ("the answer is d", "D"),
        ("**Answer: C**", "C"),
        ("Answer: $C$", "C"),
        (r"Answer: \(C\)", "C"),
        ("Answer: B) Rome", "B"),
        ("Final answer:\n\nD", "D"),
        ("ANSWER: (A)", "A"),
        ("The answer is A because it is.", "A"),
        ("Option A is wrong. Option C is correct.", "C"),
        ("Option C is correct, option A is wrong.", "C"),
        ("Answer: B. No, wait. Answer: C", "C"),
        ("<think>Answer: B</think>Answer: C", "C"),
        ("C\n\nBecause it is.", "C"),
        ("B) is out.\n\nD) Oslo", "D"),
        (r"\boxed{\text{C}}", "C"),
        (r"Answer: B, so \boxed{C. Bern}", "C"),
        (r"\boxed{\textbf{(C)}\ 5}", "C"),
        ("I like Plan B.", None),
        ("A good question.", None),
        ("A\u2019s fine", None),
        ("The answer is a matter of taste.", None),
        ("Answer: I think it is C", None),
        ("The answer is not C.", None),
        ("Answer: A or B", None),
        ("Answer: A, B", None),
        ("Answer: (A) and (B)", None),
        ("A, B", None),
        (r"\boxed{A, B}", None),
        ("The answer is Z.", None),
        ("Answer: CO2", None),
        ("", None),
    ],
)
def test_multiple_choice(response: str, choice: str | None) -> None:
    for letter in "ABCD":
        verdict = "unparseable" if choice is None else "correct" if letter == choice else "wrong"
        assert grade("multiple_choice", response, letter).verdict == verdict


@pytest.mark.parametrize(
    ("response", "label", "metadata", "verdict"),
    [
        ("The answer is Bern.", "C", CITIES, "correct"),
        ("I am sure.\n\n*Bern*", 2, CITIES, "correct"),
        ("Answer: C", "bern", CITIES, "correct"),
        ("Answer: C", "(C)", {}, "correct"),
        ("Answer: C", "B", {"correct_letter": "C"}, "correct"),
        ("Answer: D", "D", {"choices": ["x", "y"]}, "unparseable"),
        ("Answer: y", "Y", {"choices": {"X": "one", "Y": "two"}}, "correct"),
        ("Answer: K", "K", {"valid_letters": ["J", "K"]}, "correct"),
        ("Answer: C", 99, CITIES, "wrong"),
    ],
)
def test_choices_labels_and_letters(response: str, label: Any, metadata: dict[str, Any], verdict: str) -> None:
    assert grade("gpqa", response, label, metadata).verdict == verdict


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("90°", r"90^\circ"),
        ("\u22124", "-4"),
        (r"\varnothing", r"\emptyset"),
        ("= 4", "4"),
        (r"4\\", "4"),
        ("4", ["5", "4"]),
        (r"\frac{8}{2}", ["5", "4"]),
    ],
)
def test_spellings_of_mathematics(answer: str, label: Any) -> None:
    assert grade("math", rf"\boxed{{{answer}}}", label).verdict == "correct"


def test_random_is_a_fair_and_repeatable_coin() -> None:
    scores = [grade("random", str(i), None).score for i in range(400)]
    assert scores == [grade("random", str(i), None).score for i in range(400)]
    assert 150 < sum(scores) < 250


QUICK = sorted(name for name, spec in REWARDS.items() if spec.quick is not None)
WORDS = ["answer", "Answer:", "is", "A", "(B)", "C.", "or", "\n", "\\boxed{", "}", "</think>", "####", "$", "**", "1,0"]
TEXT = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))
LABEL = st.one_of(TEXT, st.integers(), st.floats(), st.booleans(), st.none(), st.lists(TEXT, max_size=2))


@settings(max_examples=120, deadline=None)
@given(name=st.sampled_from(QUICK), response=TEXT, label=LABEL, choices=st.lists(TEXT, max_size=4))
def test_string_work_never_raises(name: str, response: str, label: Any, choices: list[str]) -> None:
    quick = REWARDS[name].quick
    assert quick is not None
    got = quick(response, label, {"choices": choices})
    assert got is None or -1 <= got.score <= 1


@settings(max_examples=200, deadline=None)
@given(
    answer=st.text(st.characters(exclude_characters="{}\\$", exclude_categories=["C", "Z"]), min_size=1, max_size=20)
)
def test_the_label_itself_is_right(answer: str) -> None:
    responses = {
        "exact_match": answer,
        "boxed_exact_match": rf"\boxed{{{answer}}}",
        "math": rf"\boxed{{{answer}}}",
        "deepscaler": rf"</think>\boxed{{{answer}}}",
        "dapo": rf"Answer: \boxed{{{answer}}}",
    }
    for name, response in responses.items():
        quick = REWARDS[name].quick
        assert quick is not None
        got = quick(response, answer, {})
        assert got is not None and got.verdict == "correct", name


@pytest.mark.parametrize("name", QUICK)
def test_string_work_takes_linear_time(name: str) -> None:
    quick = REWARDS[name].quick
    assert quick is not None
    pieces = ["answer ", "answer : ", "Answer:", "is A", "\\boxed{", "{", "}", "(A)", " ", "\n", "*", "A, ", "</think>"]
    started = time.thread_time()  # what others do on the machine is not counted
    for piece in pieces:
        quick(piece * 20_000, "A", {})
    assert time.thread_time() - started < 20, "the square of these lengths takes hours"
