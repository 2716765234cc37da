"""What of an answer's log-probs is a support."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vime.engine.vllm.answers import parse_completions, request_body
from vime.engine.vllm.supports import entries_wanted, most_entries, read_support
from vime.engine.vllm.versions import KNOWN
from vime.errors import EngineError
from vime.protocols import GenerateRequest, SamplingParams


def asked(wants: bool = True, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=(1, 2),
        sampling=SamplingParams(**sampling),
        routed_experts_start=None,
        wants_support=wants,
    )


def position(*probabilities: tuple[int, float], spelling: str = "token_id") -> dict[str, Any]:
    """An engine's entry of a token: the sampled one first."""
    tops = [
        {spelling: i if spelling == "token_id" else f"token_id:{i}", "logprob": math.log(p) if p else -9999.0}
        for i, p in probabilities
    ]
    return {**tops[0], "top_logprobs": tops}


def test_as_many_log_probs_are_asked_for_as_top_k_lets_through_and_some_more() -> None:
    assert most_entries(20, 1000) == 36 and most_entries(20, 30) == 30
    assert entries_wanted(asked(top_k=20), 36) == 36 and entries_wanted(asked(top_k=5, top_p=0.5), 36) == 21
    assert entries_wanted(asked(top_k=100), 36) == 36  # such an answer will not sum to 1
    for nothing in (asked(), asked(wants=False, top_k=20), asked(top_k=20, temperature=0.0)):
        assert entries_wanted(nothing, 36) == 0 and entries_wanted(asked(top_k=20), None) == 0
    for endless in (asked(top_p=0.9), asked(min_p=0.1)):
        with pytest.raises(EngineError, match="without top_k"):
            entries_wanted(endless, 36)
    assert request_body(asked(top_k=20), "m", None, 36)["sampling_params"]["logprobs"] == 36
    assert request_body(asked(top_k=20), "m")["sampling_params"]["logprobs"] == 0


@pytest.mark.parametrize("spelling", ["token_id", "token"])
def test_what_has_a_probability_is_the_support(spelling: str) -> None:
    content = [
        position((5, 0.25), (9, 0.75), (3, 0.0), spelling=spelling),
        position((7, 1.0), (1, 0.0), (2, 0.0), spelling=spelling),
    ]
    support = read_support(content, 3)
    assert support is not None and support.rows() == [[5, 9], [7]]
    assert read_support(content, 0) is None
    empty = read_support([], 3)
    assert empty is not None and empty.rows() == []


def test_a_part_of_a_support_is_refused() -> None:
    for wrong in (position((5, 0.25), (9, 0.7)), position((5, 0.6), (9, 0.6)), {"token_id": 5, "logprob": -0.1}):
        with pytest.raises(EngineError, match=r"token 1 came with the log-probs of .* not all that could have been"):
            read_support([position((7, 1.0)), wrong], 3)
    with pytest.raises(EngineError, match="named a token 'x'"):
        read_support([{"top_logprobs": [{"token": "x", "logprob": 0.0}]}], 3)


def test_a_completion_has_its_support() -> None:
    content = [position((5, 0.25), (9, 0.75)), position((6, 1.0))]
    choice = {"index": 0, "token_ids": [5, 6], "logprobs": {"content": content}, "finish_reason": "stop"}
    (found,) = parse_completions({"choices": [choice]}, asked(top_k=4), KNOWN[0, 26], 1, None, 20)
    assert found.support is not None and found.support.rows() == [[5, 9], [6]]
    (plain,) = parse_completions({"choices": [choice]}, asked(), KNOWN[0, 26], 1, None, 20)
    assert plain.support is None
