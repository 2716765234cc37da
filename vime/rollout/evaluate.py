"""Held-out evaluation: every prompt of every set, scored, summed up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vime.config import Config
from vime.config.eval_sets import EvalSet
from vime.data.buffer import new_group
from vime.errors import EngineError, VimeError
from vime.protocols import Engines, RolloutContext, SamplingParams
from vime.rollout.eval_data import HeldOutSet
from vime.rollout.generate import request_seed
from vime.rollout.runner import GroupRunner, Outcome
from vime.rollout.stats import length_metrics, pass_rates, reward_entries, trajectory_rewards, verdict_ratios
from vime.types import Group, Metrics, RolloutResult, Sample, SampleStatus

SET_KEY = "eval_set"
"""Where a held-out sample's set is kept in its metadata."""
_MAX_FAILED_SHARE = 0.25


async def evaluate(
    context: RolloutContext, rollout_id: int, sets: Mapping[str, HeldOutSet], engines: Engines
) -> RolloutResult:
    """All samples of all sets (their set under metadata["eval_set"]) and the metrics eval/<set>….

    The sets share the engines, side by side. A sample that failed counts as reward 0 and in eval/<set>-failed_ratio.
    Sampling with a temperature uses seeds that depend on --rollout-seed, the set's name and the prompt's place in it
    alone, so that two evaluations differ by their weights.
    Raises: EngineError or VimeError when more than a quarter of a set's samples failed.
    """
    slots = asyncio.Semaphore(context.config.rollout.rollout_concurrency)
    first_ids = _first_ids(sets)
    work = [
        asyncio.ensure_future(
            _run_set(context, engines, held_out, first_ids[name], slots, rollout_id, name=f"eval-{rollout_id}-{number}")
        )
        for number, (name, held_out) in enumerate(sets.items())
    ]
    try:
        results = await asyncio.gather(*work)
    except BaseException:  # ctrl-C, too: no request may outlive its evaluation
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        raise
    metrics: Metrics = {}
    for (name, held_out), groups in zip(sets.items(), results, strict=True):
        metrics |= set_metrics(name, groups, held_out.settings.reward_key)
        metrics[f"eval/{name}-num_dropped_prompts"] = float(held_out.num_dropped)
    return RolloutResult([group for groups in results for group in groups], metrics)


async def _run_set(
    context: RolloutContext,
    engines: Engines,
    held_out: HeldOutSet,
    first: tuple[int, int],
    slots: asyncio.Semaphore,
    rollout_id: int,
    *,
    name: str,
) -> list[Group]:
    """The finished groups of one set, in its order. Args: first: ids of its first group and its first sample."""
    settings = held_out.settings
    seed, (first_group, _) = context.config.data.rollout_seed, first

    def seed_of(group: Group) -> int | None:
        place = group.group_id - first_group
        return request_seed(seed, "eval", settings.name, place) if settings.temperature > 0 else None

    runner = GroupRunner(
        context,
        engines,
        sampling=eval_sampling(settings, context.config),
        seed_of=seed_of,
        name=name,
        max_context_len=settings.max_context_len,
        generate_path=settings.custom_generate_function_path,
        slots=slots,
        rollout_id=rollout_id,
        evaluation=True,
    )
    outcomes: list[Outcome] = []
    try:
        for group in _groups(held_out, first):
            runner.start(group)
        while runner.num_outstanding:
            outcomes.append(await runner.next_outcome())
    except BaseException:
        await runner.cancel()
        raise
    _check_failures(settings.name, outcomes)
    return sorted((outcome.group for outcome in outcomes), key=lambda group: group.group_id)


def eval_sampling(settings: EvalSet, config: Config) -> SamplingParams:
    """How a set's samples are drawn; `n`, `seed` and room in the context are set per request."""
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_response_len,
        min_tokens=settings.min_new_tokens,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
        skip_special_tokens=config.rollout.rollout_skip_special_tokens,
    )


def set_metrics(name: str, groups: Sequence[Group], reward_key: str | None) -> Metrics:
    """The metrics of one set. Siblings of a trajectory count once, by their mean reward."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [trajectory_rewards(group, reward_key) for group in groups]
    prompt_means = np.array([np.mean(of_group) for of_group in rewards])
    prefix = f"eval/{name}"
    metrics: Metrics = {
        prefix: float(np.mean(np.concatenate(rewards))),
        f"{prefix}-truncated_ratio": _share(samples, SampleStatus.TRUNCATED),
        f"{prefix}-failed_ratio": _share(samples, SampleStatus.FAILED),
        f"{prefix}-num_prompts": float(len(groups)),
        f"{prefix}-num_samples": float(len(samples)),
    }
    if len(groups) > 1:
        metrics[f"{prefix}-stderr"] = float(prompt_means.std(ddof=1)) / math.sqrt(len(groups))
    metrics |= length_metrics(f"{prefix}-response_len", [s.response_length for s in samples])
    metrics |= verdict_ratios(f"{prefix}-reward_", samples)
    metrics |= reward_entries(f"{prefix}-reward/", samples)
    return metrics | {f"{prefix}-pass@{k}": rate for k, rate in pass_rates(rewards).items()}


def _first_ids(sets: Mapping[str, HeldOutSet]) -> dict[str, tuple[int, int]]:
    """Ids of each set's first group and first sample: unique over all sets."""
    group_id = sample_id = 0
    ids = {}
    for name, held_out in sets.items():
        ids[name] = (group_id, sample_id)
        group_id += len(held_out)
        sample_id += len(held_out) * held_out.settings.n_samples_per_eval_prompt
    return ids


def _groups(held_out: HeldOutSet, first: tuple[int, int]) -> Iterator[Group]:
    settings = held_out.settings
    forced = {**settings.metadata_overrides, SET_KEY: settings.name}
    if settings.rm_type is not None:
        forced["rm_type"] = settings.rm_type
    n = settings.n_samples_per_eval_prompt
    for place, prompt in enumerate(held_out):
        yield new_group(
            replace(prompt, metadata={**prompt.metadata, **forced}),
            group_id=first[0] + place,
            first_sample_id=first[1] + place * n,
            n_samples=n,
        )


def _check_failures(name: str, outcomes: Sequence[Outcome]) -> None:
    failed = [o for o in outcomes if o.error is not None or o.is_aborted]
    if len(failed) > _MAX_FAILED_SHARE * len(outcomes):
        error = failed[0].error or EngineError("an engine aborted a request that nobody asked it to abort")
        kind = EngineError if isinstance(error, EngineError) else VimeError
        raise kind(
            f"{len(failed)} of {len(outcomes)} prompts of the held-out set {name} failed; the first: "
            f"{type(error).__name__}: {error}"
        ) from error
    for outcome in failed:
        if outcome.is_aborted:
            for sample in outcome.group.samples:
                sample.status = SampleStatus.FAILED
                sample.metadata["error"] = "generate: aborted by the engine"


def _share(samples: Sequence[Sample], status: SampleStatus) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)
