"""One group's generation by requests to the engines: all its samples in one, or each from where it was left."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vime.config import Config
from vime.errors import DataError, EngineError
from vime.protocols import Completion, Engines, GenerateRequest, SamplingParams
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
        min_p=rollout.rollout_min_p,
        max_tokens=rollout.rollout_max_response_len,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def request_seed(*parts: int | str) -> int:
    """A seed that these parts alone decide, such as (rollout_seed, rollout_id, group_id)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "big")


def group_seed(config: Config, *parts: int | str) -> int | None:
    """The seed of a training group's request, that these parts decide; None where engines draw from one stream."""
    return request_seed(config.data.rollout_seed, *parts) if config.rollout.rollout_request_seeds else None


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


def sampling_left(sampling: SamplingParams, sample: Sample, max_context_len: int | None) -> SamplingParams | None:
    """`sampling` for the rest of a response that was begun; None if a limit is already reached."""
    left = sampling.max_tokens - sample.response_length
    if max_context_len is not None:
        left = min(left, max_context_len - len(sample.tokens))
    return replace(sampling, max_tokens=left, n=1) if left > 0 else None


def own_copy(sample: Sample) -> Sample:
    """A copy that a user's function cannot change through the original; the tokens are shared, being immutable."""
    copied = copy.copy(sample)
    for name in ("prompt", "reward", "label", "metadata", "trace"):
        setattr(copied, name, copy.deepcopy(getattr(sample, name)))
    return copied


def is_unfinished(sample: Sample) -> bool:
    """Whether there is something left to generate."""
    return sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)


async def generate_group(
    engines: Engines,
    group: Group,
    sampling: Callable[[int | None], SamplingParams],
    *,
    request_id: str,
    tokenizer: Any,
    max_context_len: int | None = None,
) -> None:
    """Fill a group's samples: from one request for all of them, or go on with each that was begun in an earlier one.

    Args:
        sampling: how to draw the whole group (None), or its i-th sample alone.
        request_id: of the group; a sample alone appends its index.
    Raises: EngineError if a request fails, or answers with something else than it was asked for.
    """
    unfinished = [(i, s) for i, s in enumerate(group.samples) if is_unfinished(s)]
    if all(s.status is SampleStatus.PENDING for s in group.samples):
        await _generate_together(engines, group, sampling(None), request_id, tokenizer, max_context_len)
        return

    async def go_on(index: int, sample: Sample) -> None:
        left = sampling_left(sampling(index), sample, max_context_len)
        if left is None:
            sample.status = SampleStatus.TRUNCATED
            return
        request = GenerateRequest(
            request_id=f"{request_id}-{index}",
            token_ids=sample.tokens,
            sampling=left,
            routed_experts_start=sample.num_routed,
        )
        (completion,) = _expect(await engines.generate(request), request)
        apply_completion(sample, completion, tokenizer, skip_special_tokens=left.skip_special_tokens)

    results = await asyncio.gather(*(go_on(i, s) for i, s in unfinished), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _generate_together(
    engines: Engines,
    group: Group,
    sampling: SamplingParams,
    request_id: str,
    tokenizer: Any,
    max_context_len: int | None,
) -> None:
    prompt = group.samples[0].tokens
    if any(s.tokens != prompt or s.response_length for s in group.samples):
        raise ValueError(f"group {group.group_id}: one request needs pending samples of one prompt")
    sampling = replace(fit_context(sampling, len(prompt), max_context_len), n=len(group.samples))
    request = GenerateRequest(request_id=request_id, token_ids=prompt, sampling=sampling)
    completions = _expect(await engines.generate(request), request)
    for sample, completion in zip(group.samples, completions, strict=True):
        apply_completion(sample, completion, tokenizer, skip_special_tokens=sampling.skip_special_tokens)


def _expect(completions: list[Completion], request: GenerateRequest) -> list[Completion]:
    if len(completions) != request.sampling.n:
        raise EngineError(
            f"request {request.request_id} asked for {request.sampling.n} samples and got {len(completions)}"
        )
    return completions


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
            support=completion.support,
            routed_experts=completion.routed_experts,
        )
    except ValueError as error:
        raise EngineError(f"an engine's answer to sample {sample.sample_id} cannot be used: {error}") from error
    sample.response = tokenizer.decode(sample.response_tokens, skip_special_tokens=skip_special_tokens)
    sample.status = status
