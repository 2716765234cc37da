"""The tool in generation: the model calls it, its result is appended, the model answers; and the reward."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from vime.data.chat import render_chat
from vime.data.turns import text_between_turns
from vime.protocols import GenerateRequest, RolloutContext, SamplingParams
from vime.types import Sample, SampleStatus

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # as the chat template writes a call


def parse_call(text: str) -> tuple[int, int] | None:
    """The numbers that a turn asks the tool to add; None if it is no call, or not a whole one."""
    if not (text.startswith(OPEN) and text.endswith(CLOSE)):
        return None
    try:
        call = json.loads(text.removeprefix(OPEN).removesuffix(CLOSE))
        a, b = call["arguments"]["a"], call["arguments"]["b"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_right = call.get("name") == "add" and type(a) is int and type(b) is int
    return (a, b) if is_right and max(abs(a), abs(b)) < 10**6 else None


def result_tokens(tokenizer: Any, result: str) -> list[int]:
    """The tool's result as the chat template writes it behind a turn, with the next turn opened."""
    text = text_between_turns(
        lambda messages, generation_prompt: render_chat(tokenizer, messages, add_generation_prompt=generation_prompt),
        [{"role": "tool", "content": result}],
        stops=[tokenizer.eos_token],
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


async def generate(
    config: RolloutContext, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample:
    """Named by --custom-generate-function-path, called once per sample: at most one call, then an answer."""
    tokenizer = config.tokenizer
    while True:
        turn = int("call" in sample.metadata)
        seed = sampling_params.seed  # greedy evaluation has none; every turn needs its own
        request = GenerateRequest(
            request_id=f"{'eval' if evaluation else 'train'}-{sample.sample_id}-{turn}",
            token_ids=sample.tokens,  # everything so far; never text that is tokenised again
            sampling=replace(sampling_params, n=1, seed=None if seed is None else seed + turn),
        )
        (said,) = await config.engines.generate(request)
        sample.append_response(
            said.token_ids,
            said.log_probs,
            version=said.weight_versions,
            support=said.support,
            routed_experts=said.routed_experts,
        )
        sample.response = tokenizer.decode(sample.response_tokens)
        if said.finish_reason != "stop":
            sample.status = SampleStatus.ABORTED if said.finish_reason == "abort" else SampleStatus.TRUNCATED
            return sample
        text = tokenizer.decode(said.token_ids, skip_special_tokens=True)
        call = None if turn else parse_call(text)
        if call is None:
            sample.metadata["said"] = text
            sample.status = SampleStatus.COMPLETED
            return sample
        sample.metadata["call"] = list(call)
        sample.append_response(result_tokens(tokenizer, str(sum(call))), trainable=False)


async def reward(config: RolloutContext, sample: Sample) -> dict[str, float]:
    """Named by --custom-rm-path: a little for any call, more for the right one, most for the right answer."""
    call, numbers = sample.metadata.get("call"), [sample.metadata["a"], sample.metadata["b"]]
    calls_right = call == numbers
    is_right = sample.metadata.get("said") == f"It is {sample.label}."
    score = 0.1 * (call is not None) + 0.3 * calls_right + 0.6 * is_right
    return {"score": score, "calls_right": float(calls_right), "is_right": float(is_right)}
