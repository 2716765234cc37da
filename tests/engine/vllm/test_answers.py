from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from vime.engine.vllm import short_answers
from vime.engine.vllm.answers import RoutingShape, parse_completions, request_body, version_number
from vime.engine.vllm.versions import KNOWN
from vime.errors import EngineError
from vime.protocols import GenerateRequest, SamplingParams
from vime.types import RoutedRows, VersionSpan

NEW, OLD = KNOWN[0, 32], KNOWN[0, 26]
ROUTING = RoutingShape(num_layers=2, top_k=2, num_experts=8)


def asked(prompt_len: int = 1, n: int = 1, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", token_ids=tuple(range(prompt_len)), sampling=SamplingParams(n=n), **fields)


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
    (completion,) = parse_completions({"choices": [choice()]}, asked(), NEW, None)
    assert completion.token_ids == (5, 6)
    assert completion.log_probs == (-0.5, -1.5)
    assert completion.finish_reason == "stop"
    assert completion.weight_versions == (VersionSpan(0, 0, 1), VersionSpan(3, 1, 2))


def test_log_probs_may_be_bytes() -> None:
    values = np.array([-0.5, 1e-8], np.float32)
    short = choice(logprobs=None, log_probs=short_answers.encode(values))
    (completion,) = parse_completions({"choices": [short]}, asked(), NEW, None)
    assert completion.log_probs == (-0.5, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (short_answers.encode(np.array([-0.5], np.float32)), "2 tokens came with 1 log-probs"),
        (
            short_answers.encode(np.array([-0.5, np.nan], np.float32)),
            r"token 1 \(id 6\) came without a log-prob \(nan\)",
        ),
        (short_answers.encode(np.array([-np.inf, -1.0], np.float32)), "token 0 .* without a log-prob"),
        ("AAA", "no float32 in base64"),
        ("AAAA", "no float32 in base64"),
        (None, "no float32 in base64"),
    ],
)
def test_wrong_bytes_are_an_error(text: str | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_completions({"choices": [choice(logprobs=None, log_probs=text)]}, asked(), NEW, None)


def test_completions_come_in_the_order_of_their_index() -> None:
    body = {"choices": [choice(index=1, finish_reason="length"), choice(index=0)]}
    assert [c.finish_reason for c in parse_completions(body, asked(n=2), NEW, None)] == ["stop", "length"]


@pytest.mark.parametrize("more", [{}, {"log_probs": short_answers.encode(np.zeros(0, np.float32))}])
def test_a_request_aborted_before_its_first_token_is_empty(more: dict[str, Any]) -> None:
    empty = choice(token_ids=[], logprobs=None, finish_reason="abort", weight_versions=None, **more)
    (completion,) = parse_completions({"choices": [empty]}, asked(), NEW, None)
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
        parse_completions({"choices": [choice(**changes)]}, asked(), NEW, None)


def test_an_engine_that_reports_no_versions_gets_the_clients() -> None:
    body = {"choices": [choice(weight_versions=None)]}
    assert parse_completions(body, asked(), OLD, 4)[0].weight_versions == (VersionSpan(4, 0, 2),)
    with pytest.raises(EngineError, match="note_version"):
        parse_completions(body, asked(), OLD, None)


def encoded(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def routed_rows(
    text: str | None, request: GenerateRequest, routing: RoutingShape | None = ROUTING
) -> RoutedRows | None:
    body = {"choices": [choice(routed_experts=text)]}
    return parse_completions(body, request, NEW, None, routing)[0].routed_experts


@pytest.mark.parametrize("start", [0, 1, 2])
def test_routed_experts_are_those_of_the_tokens_asked_for(start: int) -> None:
    experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)[start:] % 8
    rows = routed_rows(encoded(experts), asked(3, routed_experts_start=start))
    assert rows is not None and rows.start == start and rows.rows.dtype == np.uint8
    np.testing.assert_array_equal(rows.rows, experts)
    transposed = routed_rows(encoded(np.asfortranarray(experts)), asked(3, routed_experts_start=start))
    assert transposed is not None
    np.testing.assert_array_equal(transposed.rows, experts)


def test_routed_experts_that_nobody_wants_or_an_engine_has_not_are_none() -> None:
    experts = encoded(np.zeros((4, 2, 2), np.uint8))
    assert routed_rows(None, asked(3)) is None
    assert routed_rows(experts, asked(3, routed_experts_start=None)) is None
    assert routed_rows(experts, asked(3), routing=None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (encoded(np.zeros((3, 2, 2), np.uint8)), r"shape \(3, 2, 2\).* expected \(4, 2, 2\)"),
        (encoded(np.zeros((4, 3, 2), np.uint8)), "layers"),
        (encoded(np.zeros((4, 2, 2), np.uint16)), "type uint16"),
        (encoded(np.zeros((4, 2, 2), np.int8)), "type int8"),
        (encoded(np.full((4, 2, 2), 8, np.uint8)), "name expert 8, but a layer has 8"),
        (encoded(np.array([{}] * 16).reshape(4, 2, 2)), "type object"),
        (encoded(np.zeros((4, 2, 2), np.uint8))[:-8], "13 bytes|12 bytes|10 bytes"),
        ("?" + encoded(np.zeros((4, 2, 2), np.uint8)), "no .npy file in base64"),
        (base64.b64encode(b"PK\x03\x04 a zip").decode(), "no .npy file in base64"),
        (base64.b64encode(b"").decode(), "no .npy file in base64"),
    ],
)
def test_routed_experts_of_another_kind_are_an_error(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        routed_rows(text, asked(3))


def test_two_bytes_hold_an_expert_where_there_are_more_than_256() -> None:
    routing = RoutingShape(num_layers=2, top_k=2, num_experts=257)
    rows = routed_rows(encoded(np.full((4, 2, 2), 256, np.uint16)), asked(3), routing)
    assert rows is not None and rows.rows.dtype == np.uint16 and rows.rows.max() == 256


@pytest.mark.parametrize(("start", "sent"), [(0, 0), (2, 2), (9, 2), (None, 2)])
def test_a_request_leaves_out_rows_that_are_not_wanted(start: int | None, sent: int) -> None:
    request = asked(3, routed_experts_start=start)
    assert request_body(request, "policy", ROUTING)["sampling_params"]["routed_experts_prompt_start"] == sent
    assert "routed_experts_prompt_start" not in request_body(request, "policy")["sampling_params"]


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
