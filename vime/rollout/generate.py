"""One group's generation: a request to the engines, or the user's generate function once per sample."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vime.config import Config
from vime.errors import DataError, EngineError
from vime.protocols import Completion, Engines, GenerateFunction, GenerateRequest, RolloutContext, SamplingParams
from vime.types import Group, Sample, SampleStatus

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
# Engines seed the k-th sample of a request with seed + k, so seeds of different groups must lie far apart; 48 random
# bits do that and survive JSON readers that hold numbers as doubles.
_SEED_BYTES = 6


def rollout_sampling(config: Config) -> SamplingParams:
    """How training samples are drawn; `n`, `seed` and room in the context are set per request."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_tokens=rollout.rollout_max_response_len,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def request_seed(*parts: int | str) -> int:
    """A seed that these parts alone decide, such as (rollout_seed, rollout_id, group_id)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "big")


def fit_context(sampling: SamplingParams, prompt_len: int, max_context_len: int | None) -> SamplingParams:
    """`sampling` with max_tokens cut to the room that is left. Raises: DataError if none is."""
    if max_context_len is None:
        return sampling
    room = max_context_len - prompt_len
    if room < 1:
        raise DataError(
            f"a prompt of {prompt_len} tokens leaves no room in the {max_context_len} of --rollout-max-context-len "
            "(of a held-out set: max_context_len)"
        )
    return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)


async def generate_group(
    engines: Engines, group: Group, sampling: SamplingParams, *, request_id: str, tokenizer: Any
) -> None:
    """Fill a group's pending samples from one request for all of them.

    Raises: EngineError if the request fails, or answers with something else than it was asked for.
    """
    prompt = group.samples[0].tokens
    if any(s.tokens != prompt or s.response_length for s in group.samples):
        raise ValueError(f"group {group.group_id}: one request needs pending samples of one prompt")
    request = GenerateRequest(request_id=request_id, token_ids=prompt, sampling=replace(sampling, n=len(group.samples)))
    completions = await engines.generate(request)
    if len(completions) != len(group.samples):
        raise EngineError(f"request {request_id} asked for {len(group.samples)} samples and got {len(completions)}")
    for sample, completion in zip(group.samples, completions, strict=True):
        apply_completion(sample, completion, tokenizer, skip_special_tokens=sampling.skip_special_tokens)


def apply_completion(sample: Sample, completion: Completion, tokenizer: Any, *, skip_special_tokens: bool) -> None:
    """Append a completion's tokens to a sample, with their text and the status.

    The tokens are the engine's own; the text is decoded from all response tokens, for rewards only.
    Raises: EngineError for an unknown finish reason or tokens without log-probs.
    """
    status = _STATUS.get(completion.finish_reason)
    if status is None:
        raise EngineError(f"an engine ended a response with {completion.finish_reason!r}; known are {sorted(_STATUS)}")
    try:
        sample.append_response(
            completion.token_ids,
            completion.log_probs,
            version=completion.weight_versions,
            routed_experts=completion.routed_experts,
        )
    except ValueError as error:
        raise EngineError(f"an engine's answer to sample {sample.sample_id} cannot be used: {error}") from error
    sample.response = tokenizer.decode(sample.response_tokens, skip_special_tokens=skip_special_tokens)
    sample.status = status


async def generate_by_hook(
    hook: GenerateFunction,
    context: RolloutContext,
    group: Group,
    sampling: Callable[[int], SamplingParams],
    slots: asyncio.Semaphore,
    max_context_len: int | None,
) -> list[Sample]:
    """The samples that the user's generate function makes of a group's, each in a slot of its own.

    A function may return several samples for one: siblings, which keep the episode's group_id and trajectory_id.

    Args:
        sampling: the sampling parameters of the i-th sample.
        max_context_len: tokens a sample may have.
    Raises: what the function raises, once all of the group's calls have ended; EngineError if it returned no samples.
    """

    async def one(index: int, sample: Sample) -> list[Sample]:
        async with slots:
            result = await hook(context, sample, sampling(index))
        return _siblings(sample, result, max_context_len)

    results = await asyncio.gather(*(one(i, s) for i, s in enumerate(group.samples)), return_exceptions=True)
    samples: list[Sample] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        samples += result
    return samples


def _siblings(origin: Sample, result: Any, max_context_len: int | None) -> list[Sample]:
    siblings = [result] if isinstance(result, Sample) else result
    if not isinstance(siblings, list) or not siblings or not all(isinstance(s, Sample) for s in siblings):
        raise EngineError(
            f"the custom generate function returned {str(result)[:200]}; return a Sample or a list of them"
        )
    if len({id(sibling) for sibling in siblings}) < len(siblings):
        raise EngineError("the custom generate function returned one Sample twice; a sibling is an object of its own")
    for sibling in siblings:
        sibling.group_id, sibling.trajectory_id = origin.group_id, origin.trajectory_id
        if sibling.sample_id < 0:
            sibling.sample_id = origin.sample_id
        if sibling.status is SampleStatus.PENDING:
            raise EngineError(f"the custom generate function left sample {origin.sample_id} pending; set its status")
        if not isinstance(sibling.status, SampleStatus) or not isinstance(sibling.metadata, dict):
            raise EngineError(
                f"the custom generate function gave sample {origin.sample_id} the status {sibling.status!r} and "
                f"metadata of type {type(sibling.metadata).__name__}; a SampleStatus and a dict are expected"
            )
        if min(sibling.tokens, default=0) < 0:
            raise EngineError(f"the custom generate function gave sample {origin.sample_id} a negative token id")
        if max_context_len is not None and len(sibling.tokens) > max_context_len:
            raise EngineError(
                f"the custom generate function made sample {origin.sample_id} {len(sibling.tokens)} tokens long, above "
                f"the {max_context_len} of --rollout-max-context-len (of a held-out set: max_context_len)"
            )
    return siblings
