from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from vime.engine.vllm.answers import parse_completions, request_body, version_number
from vime.engine.vllm.versions import KNOWN
from vime.errors import EngineError
from vime.protocols import GenerateRequest, SamplingParams
from vime.types import VersionSpan

NEW, OLD = KNOWN[0, 32], KNOWN[0, 26]


def choice(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}]
    whole = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}],
    }
    return {**whole, **changes}


def test_a_complete_answer() -> None:
    (completion,) = parse_completions({"choices": [choice()]}, 1, NEW, None)
    assert completion.token_ids == (5, 6)
    assert completion.log_probs == (-0.5, -1.5)
    assert completion.finish_reason == "stop"
    assert completion.weight_versions == (VersionSpan(0, 0, 1), VersionSpan(3, 1, 2))


def test_completions_come_in_the_order_of_their_index() -> None:
    body = {"choices": [choice(index=1, finish_reason="length"), choice(index=0)]}
    assert [c.finish_reason for c in parse_completions(body, 2, NEW, None)] == ["stop", "length"]


def test_a_request_aborted_before_its_first_token_is_empty() -> None:
    empty = choice(token_ids=[], logprobs=None, finish_reason="abort", weight_versions=None)
    (completion,) = parse_completions({"choices": [empty]}, 1, NEW, None)
    assert completion.token_ids == completion.log_probs == completion.weight_versions == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "error"}, "unknown finish reason 'error'"),
        ({"finish_reason": None}, "unknown finish reason None"),
        ({"logprobs": None}, "2 tokens came with 0 log-probs"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}] * 2}}, "without a log-prob"),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": -1.0}] * 2}}, "its log-prob is of id 7"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "do not cover the 2 tokens"),
        ({"weight_versions": [{"version": "main", "start": 0, "end": 2}]}, "labelled 'main'"),
        ({"index": 1}, "asked for 1 completions"),
    ],
)
def test_an_incomplete_answer_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_completions({"choices": [choice(**changes)]}, 1, NEW, None)


def test_an_engine_that_reports_no_versions_gets_the_clients() -> None:
    body = {"choices": [choice(weight_versions=None)]}
    assert parse_completions(body, 1, OLD, 4)[0].weight_versions == (VersionSpan(4, 0, 2),)
    with pytest.raises(EngineError, match="note_version"):
        parse_completions(body, 1, OLD, None)


def test_routed_experts_are_decoded_without_pickle() -> None:
    def encoded(array: np.ndarray[Any, Any]) -> str:
        file = io.BytesIO()
        np.save(file, array)
        return base64.b64encode(file.getvalue()).decode()

    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    (completion,) = parse_completions({"choices": [choice(routed_experts=encoded(experts))]}, 1, NEW, None)
    np.testing.assert_array_equal(completion.routed_experts, experts)
    with pytest.raises(ValueError, match="pickle"):
        parse_completions({"choices": [choice(routed_experts=encoded(np.array([{}])))]}, 1, NEW, None)


def test_a_request_asks_for_log_probs_and_for_text_only_where_stop_strings_need_it() -> None:
    def sampling(**values: Any) -> dict[str, Any]:
        request = GenerateRequest(request_id="r", token_ids=(1, 2), sampling=SamplingParams(**values))
        return dict(request_body(request, "policy")["sampling_params"])

    plain = sampling(n=4, seed=3)
    assert (plain["logprobs"], plain["n"], plain["seed"], plain["detokenize"]) == (0, 4, 3, False)
    assert "detokenize" not in sampling(stop=("\n",)) and sampling(stop=("\n",))["stop"] == ["\n"]
    assert "seed" not in sampling()


def test_version_labels() -> None:
    assert (version_number("default"), version_number("12")) == (0, 12)
