"""Users' functions, for the rollout's tests; loaded by dotted path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from vime.protocols import GenerateRequest, RolloutContext, SamplingParams
from vime.rollout.generate import apply_completion
from vime.types import Sample, SampleStatus


async def two_turns(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generates, lets a tool write a token, generates again."""
    for turn in range(2):
        if turn:
            sample.append_response([7], trainable=False)
        request = GenerateRequest(
            request_id=f"hook-{sample.sample_id}-{turn}",
            token_ids=sample.tokens,
            sampling=replace(sampling_params, n=1),
        )
        (completion,) = await config.engines.generate(request)
        apply_completion(sample, completion, config.tokenizer, skip_special_tokens=True)
    sample.reward = float(sample.sample_id % 2)
    return sample


async def fan_out(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> list[Sample]:
    """Two siblings of one episode, made without copying ids."""
    siblings = []
    for reward in (0.0, 1.0):
        sibling = Sample(tokens=sample.prompt_tokens, label=sample.label, status=SampleStatus.COMPLETED, reward=reward)
        sibling.append_response([3], [-1.0], version=0)
        siblings.append(sibling)
    return siblings


async def fan_out_aborted_once(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> list[Sample]:
    """Two siblings of one episode; the first time, the second group's are cut off from outside."""
    siblings = await fan_out(config, sample, sampling_params)
    if sample.group_id == 1 and sample.sample_id not in config.tokenizer.aborted_samples:
        config.tokenizer.aborted_samples.add(sample.sample_id)
        siblings[1].status = SampleStatus.ABORTED
    return siblings


async def fails_on_some(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Raises for one prompt of ten."""
    if sample.label == "3":
        raise LookupError("the tool is gone")
    sample.append_response([3], [-1.0], version=0)
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    return sample


async def leaves_pending(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Forgets to do anything."""
    return sample


async def slow_for_large_groups(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Never ends for groups from the fifth on, and leaves traces in the sample."""
    sample.metadata["turns"] = 1
    sample.append_response([3], [-1.0], version=0)
    if sample.group_id >= 4:
        await asyncio.sleep(3600)
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    return sample


async def reward_that_notes(config: RolloutContext, sample: Sample) -> float:
    """A reward that writes into the sample; it never ends for the fifth group."""
    sample.metadata["seen"] = sample.metadata.get("seen", 0) + 1
    if sample.group_id == 4:
        await asyncio.sleep(3600)
    return 1.0


async def nan_on_some(config: RolloutContext, sample: Sample) -> float:
    """A reward that is no number for one prompt of ten."""
    return float("nan") if sample.label == "3" else 1.0


def keep_odd(config: RolloutContext, samples: Sequence[Sample]) -> bool:
    """A filter that answers with a plain bool."""
    return samples[0].group_id % 2 == 1


def keep_none(config: RolloutContext, samples: Sequence[Sample]) -> bool:
    """A filter that drops everything."""
    return False


async def async_filter(config: RolloutContext, samples: Sequence[Sample]) -> bool:
    """Not usable: filters are plain functions."""
    return True


async def answers_wrongly(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> object:
    """Breaks the contract in the way that --rollout-stop names."""
    sample.append_response([3], [-1.0], version=0)
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    match config.config.rollout.rollout_stop[0]:
        case "twice":
            return [sample, sample]
        case "status":
            sample.status = "done"  # type: ignore[assignment]
        case "metadata":
            sample.metadata = None  # type: ignore[assignment]
        case "token":
            return Sample(tokens=(-5, 3), status=SampleStatus.COMPLETED, reward=1.0)
        case "long":
            sample.append_response([3] * 64, [-1.0] * 64, version=0)
        case "reward":
            sample.reward = "good"  # type: ignore[assignment]
        case "nan":
            sample.reward = float("nan")
    return sample


def filter_that_raises(config: RolloutContext, samples: Sequence[Sample]) -> bool:
    """Has a bug."""
    raise LookupError("a bug")


def filter_that_says_no(config: RolloutContext, samples: Sequence[Sample]) -> str:
    """Text is no verdict: it would count as true."""
    return "no"


async def first_is_best(config: RolloutContext, samples: list[Sample]) -> list[float]:
    """A group reward: 1 for the group's first sample."""
    return [float(i == 0) for i in range(len(samples))]
