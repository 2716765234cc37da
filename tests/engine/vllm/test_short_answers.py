"""vLLM's own serving method, with a stub engine behind it, answers with bytes; whatever else is asked, as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime.engine.vllm import short_answers

IDS = ([5, 6, 7], [8, 9])
LOG_PROBS = ([-0.1, -2.5, -0.3333333], [-11.25, 0.0])


def results(*, flat: bool) -> AsyncIterator[Any]:
    """What the engine gives for two responses, as vLLM keeps it."""
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    outputs = []
    for index, (ids, values) in enumerate(zip(IDS, LOG_PROBS, strict=True)):
        kept = create_sample_logprobs(flat)
        for token, value in zip(ids, values, strict=True):
            append_logprobs_for_next_position(kept, [token], [value], [None], 1, 0)
        outputs.append(CompletionOutput(index, "", ids, None, kept, finish_reason="length"))

    async def generate() -> AsyncIterator[Any]:
        yield RequestOutput("r", None, [1, 2], None, outputs, True)

    return generate()


def serve(logprobs: int | None, *, flat: bool = True) -> dict[str, Any]:
    """The body of an answer."""
    from vllm import SamplingParams
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    short_answers.install()
    short_answers.install()
    request = GenerateRequest(token_ids=[1, 2], sampling_params=SamplingParams(n=2, logprobs=logprobs))
    server = ServingTokens.__new__(ServingTokens)
    server.enable_prompt_tokens_details = server.enable_log_outputs = server.has_tokenizer = False
    server.request_logger = None
    answer = asyncio.run(
        server.serve_tokens_full_generator(request, results(flat=flat), "r", "policy", SimpleNamespace())
    )
    return dict(answer.model_dump())


@pytest.mark.parametrize("flat", [True, False])
def test_log_probs_are_the_engines_own(flat: bool) -> None:
    pytest.importorskip("vllm")
    body = serve(0, flat=flat)
    assert [choice["token_ids"] for choice in body["choices"]] == list(map(list, IDS))
    for choice, values in zip(body["choices"], LOG_PROBS, strict=True):
        assert choice["logprobs"] is None
        np.testing.assert_array_equal(short_answers.decode(choice["log_probs"]), np.array(values, np.float32))


def test_a_request_for_more_is_answered_as_vllm_does() -> None:
    pytest.importorskip("vllm")
    for choice, values in zip(serve(1)["choices"], LOG_PROBS, strict=True):
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == values
        assert "log_probs" not in choice
