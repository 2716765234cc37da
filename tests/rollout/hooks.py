"""Users' functions, for the rollout's tests; loaded by dotted path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from vime.protocols import DataSource, Engines, GenerateRequest, RolloutContext, SamplingParams
from vime.rollout.generate import apply_completion
from vime.types import Group, Metrics, RolloutResult, Sample, SampleStatus


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


async def fails_twice(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """An environment that is down for the first two calls of each sample; a call that fails leaves its traces."""
    assert not sample.metadata.get("traces") and not sample.response_length
    config.tokenizer.seen.append(sample.sample_id)
    if config.tokenizer.seen.count(sample.sample_id) <= 2:
        sample.metadata["traces"] = True
        raise ConnectionError("the environment is down")
    return await two_turns(config, sample, sampling_params)


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
        case "large":
            sample.reward = 1e200
        case "float":
            sample.append_response([3.7], [-1.0], version=0)  # type: ignore[list-item]
        case "exit":
            raise SystemExit(0)
        case "cancel":
            raise asyncio.CancelledError
        case "shared":
            made = config.tokenizer.made
            return made.setdefault(sample.group_id, sample)
    return sample


def drop_a_sample(config: RolloutContext, groups: Sequence[Group]) -> None:
    """A sample filter marks samples; it must not take them out."""
    groups[0].samples.pop()


def log_and_double(
    config: RolloutContext, rollout_id: int, groups: list[Group], metrics: Metrics, seconds: float
) -> None:
    """A log function looks at the groups; it must not change which there are."""
    groups.append(groups[0])


async def reward_that_moves(config: RolloutContext, sample: Sample) -> float:
    """A reward must not put the sample into another group."""
    sample.group_id = 5
    return 1.0


def rollout_of_twins(
    config: RolloutContext, rollout_id: int, data_source: DataSource, engines: Engines, evaluation: bool = False
) -> RolloutResult:
    """Gives one group twice."""
    (group,) = data_source.get_groups(1)
    return RolloutResult([group, Group(group.group_id, group.samples)])


def filter_that_raises(config: RolloutContext, samples: Sequence[Sample]) -> bool:
    """Has a bug."""
    raise LookupError("a bug")


def filter_that_says_no(config: RolloutContext, samples: Sequence[Sample]) -> str:
    """Text is no verdict: it would count as true."""
    return "no"


async def first_is_best(config: RolloutContext, samples: list[Sample]) -> list[float]:
    """A group reward: 1 for the group's first sample."""
    return [float(i == 0) for i in range(len(samples))]


async def told_of_evaluation(
    config: RolloutContext, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample:
    """Rewards itself with what it was told."""
    sample.append_response([3], [-1.0], version=0)
    sample.status, sample.reward = SampleStatus.COMPLETED, float(evaluation)
    return sample


async def hangs_on_some(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Never ends for one sample of one prompt."""
    sample.append_response([3], [-1.0], version=0)
    if sample.sample_id == 3:
        await asyncio.sleep(3600)
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    return sample


async def goes_on(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Two turns that remember where they are, so that an aborted sample can be gone on with."""
    for turn in range(sample.metadata.setdefault("turn", 0), 2):
        request = GenerateRequest(
            request_id=f"goes-on-{sample.group_id}-{sample.sample_id}-{turn}",
            token_ids=sample.tokens,
            sampling=replace(sampling_params, n=1),
        )
        (completion,) = await config.engines.generate(request)
        apply_completion(sample, completion, config.tokenizer, skip_special_tokens=True)
        if sample.status is SampleStatus.ABORTED:
            return sample
        sample.metadata["turn"] = turn + 1
    sample.reward = float(sample.sample_id % 2)
    return sample


async def ignores_the_abort(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Calls every sample completed."""
    sample = await goes_on(config, sample, sampling_params)
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    return sample


def append_id(config: RolloutContext, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    """A sample hook that changes the sample it is given."""
    sample.response += f"|{rollout_id}{'e' if evaluation else 't'}"


def label_is_response(config: RolloutContext, sample: Sample, *, rollout_id: int, evaluation: bool) -> Sample:
    """A sample hook that gives another sample: whatever was said is right."""
    return replace(sample, label=sample.response, group_id=-1, trajectory_id=-1)


def sample_hook_that_raises(config: RolloutContext, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    """Has a bug that one prompt of ten meets."""
    if sample.label == "3":
        raise LookupError("a bug")


def sample_hook_that_gives_text(config: RolloutContext, sample: Sample, *, rollout_id: int, evaluation: bool) -> str:
    """Forgets that a sample is wanted."""
    return sample.response


def remove_the_odd(config: RolloutContext, groups: Sequence[Group]) -> None:
    """A sample filter."""
    for group in groups:
        for sample in group.samples:
            sample.remove_sample = sample.sample_id % 2 == 1


def remove_by_text(config: RolloutContext, groups: Sequence[Group]) -> None:
    """A sample filter that means well."""
    groups[0].samples[0].remove_sample = "yes"  # type: ignore[assignment]


def note_all(config: RolloutContext, all_groups: Sequence[Group], data_source: DataSource) -> None:
    """Sees all groups; keeps what it saw where the test finds it."""
    config.tokenizer.seen = [(g.group_id, [s.status for s in g.samples]) for g in all_groups], data_source


def log_and_skip(
    config: RolloutContext, rollout_id: int, groups: Sequence[Group], metrics: Metrics, seconds: float
) -> bool:
    """Logs one number in place of all others."""
    metrics["custom/groups"] = float(len(groups)) + rollout_id
    metrics["custom/took_time"] = float(seconds > 0)
    return True


def log_eval(config: RolloutContext, rollout_id: int, groups: Sequence[Group], metrics: Metrics) -> None:
    """Logs one number beside the others."""
    metrics["custom/eval_groups"] = float(len(groups))


def log_text(
    config: RolloutContext, rollout_id: int, groups: Sequence[Group], metrics: Metrics, seconds: float
) -> None:
    """A metric that is no number."""
    metrics["custom/model"] = "small"  # type: ignore[assignment]


def rollout_of_one(
    config: RolloutContext, rollout_id: int, data_source: object, engines: object, evaluation: bool = False
) -> RolloutResult:
    """A rollout function of a user's own."""
    group = Group(0, [Sample(group_id=0, reward=1.0)])
    return RolloutResult([group], {"custom/evaluation": float(evaluation)})


def rollout_of_a_list(
    config: RolloutContext, rollout_id: int, data_source: object, engines: object, evaluation: bool = False
) -> list[Group]:
    """Not what a rollout function returns."""
    return []


async def fans_out_late(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> list[Sample]:
    """Two siblings, the second still under way when the rollout stops."""
    second = replace(sample)
    second.reward = 1.0
    for turn, sibling in enumerate((sample, second)):
        request = GenerateRequest(
            request_id=f"goes-on-{sample.group_id if turn else 0}-{sample.sample_id}-{turn}",
            token_ids=sample.prompt_tokens,
            sampling=replace(sampling_params, n=1),
        )
        (completion,) = await config.engines.generate(request)
        apply_completion(sibling, completion, config.tokenizer, skip_special_tokens=True)
    sample.reward = 0.0
    return [sample, second]


async def own_prompt(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Makes a prompt of its own, of two tokens, and its reward."""
    made = Sample(tokens=(9, sample.sample_id), metadata=sample.metadata, status=SampleStatus.COMPLETED, reward=1.0)
    made.append_response([3], [-1.0], version=0)
    return made


async def without_versions(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Does not say which policy sampled."""
    request = GenerateRequest(request_id=f"{sample.sample_id}", token_ids=sample.tokens, sampling=sampling_params)
    (completion,) = await config.engines.generate(request)
    sample.append_response(completion.token_ids, completion.log_probs)
    sample.status = SampleStatus.COMPLETED
    return sample
