"""Held-out evaluation: every prompt of every set, scored, summed up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vime.config import Config
from vime.data.prompts import PromptSet
from vime.errors import ConfigError, EngineError, VimeError
from vime.protocols import Engines, RolloutContext, SamplingParams
from vime.rewards.score import scalar_reward
from vime.rollout.generate import request_seed, rollout_sampling
from vime.rollout.runner import GroupRunner, Outcome
from vime.rollout.stats import length_metrics, verdict_ratios
from vime.types import Group, Metrics, RolloutResult, Sample, SampleStatus

SET_KEY = "eval_set"
"""Where a held-out sample's set is kept in its metadata."""
_MAX_FAILED_SHARE = 0.25


async def evaluate(
    context: RolloutContext, rollout_id: int, sets: Mapping[str, PromptSet], engines: Engines
) -> RolloutResult:
    """All samples of all sets (their set under metadata["eval_set"]) and the metrics eval/<set>….

    A sample that failed counts as reward 0 and in eval/<set>-failed_ratio. Sampling with a temperature uses seeds that
    do not depend on the rollout, so that two evaluations differ by their weights alone.
    Raises: EngineError or VimeError when more than a quarter of the samples failed.
    """
    config = context.config
    seed = config.data.rollout_seed
    sampling = eval_sampling(config)
    runner = GroupRunner(
        context,
        engines,
        sampling=sampling,
        seed_of=lambda group: request_seed(seed, "eval", group.group_id) if sampling.temperature > 0 else None,
        name=f"eval-{rollout_id}",
    )
    outcomes: list[Outcome] = []
    try:
        for group in _groups(sets, config.eval.n_samples_per_eval_prompt):
            runner.start(group)
        while runner.num_outstanding:
            outcomes.append(await runner.next_outcome())
    except BaseException:  # ctrl-C, too: no request may outlive its evaluation
        await runner.cancel()
        raise
    _check_failures(outcomes)
    groups = sorted((outcome.group for outcome in outcomes), key=lambda group: group.group_id)
    key = config.eval.eval_reward_key or config.reward.reward_key
    metrics: Metrics = {}
    for name in sets:
        metrics |= set_metrics(name, [g for g in groups if g.samples[0].metadata[SET_KEY] == name], key)
    return RolloutResult(groups, metrics)


def eval_sampling(config: Config) -> SamplingParams:
    """How held-out samples are drawn. Raises: ConfigError for several greedy samples of a prompt."""
    settings = config.eval

    def either(value: float | None, default: float) -> float:
        return default if value is None else value

    sampling = rollout_sampling(config)
    sampling = replace(
        sampling,
        temperature=either(settings.eval_temperature, sampling.temperature),
        top_p=either(settings.eval_top_p, sampling.top_p),
        top_k=int(either(settings.eval_top_k, sampling.top_k)),
        max_tokens=int(either(settings.eval_max_response_len, sampling.max_tokens)),
    )
    if sampling.temperature == 0 and settings.n_samples_per_eval_prompt > 1:
        raise ConfigError(
            f"--n-samples-per-eval-prompt is {settings.n_samples_per_eval_prompt}, but --eval-temperature 0 is greedy "
            f"and gives one answer; use 1 sample or a temperature"
        )
    return sampling


def set_metrics(name: str, groups: Sequence[Group], reward_key: str | None) -> Metrics:
    """The metrics of one set. pass@k counts rewards of 1 and above, with the estimator of arXiv:2107.03374, eq. 1."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = {id(s): _reward(s, reward_key) for s in samples}
    prefix = f"eval/{name}"
    metrics: Metrics = {
        prefix: sum(rewards.values()) / len(samples),
        f"{prefix}-truncated_ratio": _share(samples, SampleStatus.TRUNCATED),
        f"{prefix}-failed_ratio": _share(samples, SampleStatus.FAILED),
        f"{prefix}-num_prompts": float(len(groups)),
        f"{prefix}-num_samples": float(len(samples)),
    }
    metrics |= length_metrics(f"{prefix}-response_len", [s.response_length for s in samples])
    metrics |= verdict_ratios(f"{prefix}-reward_", samples)
    n = min(len(group.samples) for group in groups)
    k = 1
    while n > 1 and k <= n:
        correct = [(len(g.samples), sum(rewards[id(s)] >= 1 for s in g.samples)) for g in groups]
        metrics[f"{prefix}-pass@{k}"] = sum(pass_at_k(m, c, k) for m, c in correct) / len(groups)
        k *= 2
    return metrics


def pass_at_k(n: int, num_correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the correct ones."""
    return 1.0 - math.comb(n - num_correct, k) / math.comb(n, k)


def _groups(sets: Mapping[str, PromptSet], n_samples: int) -> Iterator[Group]:
    group_id = 0
    for name, prompts in sets.items():
        for prompt in prompts:
            samples = [
                Sample(
                    prompt=prompt.prompt,
                    tokens=prompt.tokens,
                    label=prompt.label,
                    metadata={**prompt.metadata, SET_KEY: name},
                    group_id=group_id,
                    sample_id=group_id * n_samples + i,
                    trajectory_id=group_id * n_samples + i,
                )
                for i in range(n_samples)
            ]
            yield Group(group_id, samples)
            group_id += 1


def _check_failures(outcomes: Sequence[Outcome]) -> None:
    failed = [o for o in outcomes if o.error is not None or o.is_aborted]
    if len(failed) > _MAX_FAILED_SHARE * len(outcomes):
        error = failed[0].error or EngineError("an engine aborted a request that nobody asked it to abort")
        kind = EngineError if isinstance(error, EngineError) else VimeError
        raise kind(
            f"{len(failed)} of {len(outcomes)} held-out prompts failed; the first: {type(error).__name__}: {error}"
        ) from error
    for outcome in failed:
        if outcome.is_aborted:
            for sample in outcome.group.samples:
                sample.status = SampleStatus.FAILED
                sample.metadata["error"] = "generate: aborted by the engine"


def _reward(sample: Sample, key: str | None) -> float:
    return 0.0 if sample.status is SampleStatus.FAILED else scalar_reward(sample.reward, key)


def _share(samples: Sequence[Sample], status: SampleStatus) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)
