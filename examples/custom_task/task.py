"""The task: ask a tool for a price, then say it. Two turns of one token each, and a reward with parts."""

from __future__ import annotations

from dataclasses import replace

from vime.protocols import GenerateRequest, RolloutContext, SamplingParams
from vime.types import Sample, SampleStatus


def look_up(thing: str, prices: dict[str, str]) -> str:
    """The tool: the price, as it is shown to the model."""
    return f" costs {prices[thing]}; so " if thing in prices else " is unknown; so "


async def generate(
    config: RolloutContext, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample:
    """Named by --custom-generate-function-path, called once per sample.

    Turn 1: the model writes one token (--rollout-max-response-len), here a character: what it asks the tool for. The
    tool's words are appended as tokens that get no gradient. Turn 2: the model writes the answer.
    """
    while True:
        has_asked = "asked" in sample.metadata
        seed = sampling_params.seed  # greedy evaluation has none; every turn needs its own
        request = GenerateRequest(
            request_id=f"{'eval' if evaluation else 'train'}-{sample.sample_id}-{int(has_asked)}",
            token_ids=sample.tokens,  # everything so far; never text that is tokenised again
            sampling=replace(sampling_params, n=1, seed=None if seed is None else seed + has_asked),
        )
        (said,) = await config.engines.generate(request)
        sample.append_response(
            said.token_ids,
            said.log_probs,
            version=said.weight_versions,
            support=said.support,
            routed_experts=said.routed_experts,
        )
        sample.response = config.tokenizer.decode(sample.response_tokens)
        if said.finish_reason == "abort":  # the rollout is over; with --partial-rollout it goes on from here later
            sample.status = SampleStatus.ABORTED
            return sample
        text = config.tokenizer.decode(said.token_ids)
        if has_asked:
            sample.metadata["said"] = text
            sample.status = SampleStatus.COMPLETED
            return sample
        sample.metadata["asked"] = text
        shown = look_up(text, sample.metadata["prices"])
        sample.append_response(config.tokenizer.encode(shown, add_special_tokens=False), trainable=False)


async def reward(config: RolloutContext, sample: Sample) -> dict[str, float]:
    """Named by --custom-rm-path, called once per sample; --reward-key chooses the part to train on.

    Asking for a thing that has a price is worth a little, and so is saying any price; asking for the right one and
    saying its price are worth more: from a random model's few lucky samples there is always a next step to learn.
    """
    asked, said, prices = sample.metadata["asked"], sample.metadata["said"], sample.metadata["prices"]
    asks_right = asked == sample.metadata["thing"]
    is_right = asks_right and said == sample.label
    score = 0.1 * (asked in prices) + 0.1 * (said in prices.values()) + 0.3 * asks_right + 0.5 * is_right
    return {"score": score, "asks_right": float(asks_right), "is_right": float(is_right)}
