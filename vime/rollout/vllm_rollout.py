"""The default rollout function: asynchronous requests, rewards as they finish, dynamic sampling, evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from vime.data.source import take_groups
from vime.protocols import DataSource, Engines, RolloutContext
from vime.rollout.eval_data import HeldOutSet
from vime.rollout.evaluate import evaluate
from vime.rollout.fixed_batches import FixedBatches, collect_in_batches
from vime.rollout.generate import group_seed, rollout_sampling
from vime.rollout.kept import Kept
from vime.rollout.runner import GroupRunner
from vime.rollout.watch import LoopWatch
from vime.types import RolloutResult


def generate_rollout(
    config: RolloutContext,
    rollout_id: int,
    data_source: DataSource | Mapping[str, HeldOutSet],
    engines: Engines,
    evaluation: bool = False,
) -> RolloutResult:
    """The finished groups of one rollout, or with `evaluation` those of the held-out sets, and metrics.

    Training: `data_source` is a `DataSource`. Groups are pulled (--over-sampling-batch-size at a time, else as many as
    are missing) while fewer than --rollout-batch-size are kept or under way; each is one request for all its samples,
    or one call of --custom-generate-function-path per sample. Finished samples are scored, then the dynamic sampling
    filter looks at the group. When enough are kept the rest is aborted and put back into the source as it was handed
    out: pending, its partial or finished responses discarded; with --partial-rollout it keeps them, and the rollout
    that gets the group again goes on from there. Groups that failed or were dropped are replaced. In the end
    --rollout-sample-filter-path sees the groups kept, --rollout-all-samples-process-path all that ended.

    Evaluation: `data_source` maps each set's name to its prompts and settings (`vime.rollout.eval_data.HeldOutSet`).

    It runs an event loop of its own and ends with `engines.aclose()`; the caller must not be inside a loop.
    With --deterministic groups are generated in fixed batches (vime/rollout/fixed_batches.py).
    Each request's seed follows from (--rollout-seed, rollout_id, group_id): without over-sampling the same engines
    give the same samples again; with --no-rollout-request-seeds requests have none.

    Returns: groups by ascending group_id.
    Raises: EngineError or VimeError with the first failure as its cause when more than a quarter of the groups fail;
        VimeError when the filter drops everything; DataError, ConfigError.
    """
    if evaluation:
        assert isinstance(data_source, Mapping), f"evaluation needs named prompt sets, not {type(data_source).__name__}"
        return _completed(_closing(engines, evaluate(config, rollout_id, data_source, engines)))
    assert not isinstance(data_source, Mapping), "training needs a DataSource, not named prompt sets"
    return _completed(_closing(engines, _collect(config, rollout_id, data_source, engines)))


def _completed(work: Coroutine[Any, Any, RolloutResult]) -> RolloutResult:
    """What `work` returns, in an event loop of its own."""
    results: list[RolloutResult] = []

    async def run() -> None:
        results.append(await work)

    # Not as the result of the loop's task: asyncio.run looks at the handler of SIGINT, which holds the task, and
    # Python's signal module makes a text of it, twice: 0.7 s for 500,000 tokens.
    asyncio.run(run())
    return results[0]


async def _closing(engines: Engines, work: Coroutine[Any, Any, RolloutResult]) -> RolloutResult:
    try:
        async with LoopWatch():
            return await work
    finally:
        await engines.aclose()


async def _collect(context: RolloutContext, rollout_id: int, source: DataSource, engines: Engines) -> RolloutResult:
    config = context.config
    target = config.rollout.rollout_batch_size
    batches = FixedBatches(engines) if config.rollout.deterministic else None
    runner = GroupRunner(
        context,
        batches or engines,
        sampling=rollout_sampling(config),
        seed_of=lambda group: group_seed(config, rollout_id, group.group_id),
        name=f"rollout-{rollout_id}",
        max_context_len=config.rollout.rollout_max_context_len,
        generate_path=config.rollout.custom_generate_function_path,
        rollout_id=rollout_id,
    )
    kept = Kept(context, target, source)
    try:
        if batches is not None:
            size, name = config.rollout.rollout_concurrency, f"rollout-{rollout_id}"
            await collect_in_batches(runner, batches, kept, source, target=target, max_size=size, name=name)
        while len(kept.groups) < target:
            missing = target - len(kept.groups) - runner.num_outstanding
            if missing > 0:
                for group in take_groups(source, config.rollout.over_sampling_batch_size or missing):
                    kept.stats.start(group)
                    runner.start(group)
            outcome = await runner.next_outcome()
            if outcome.is_aborted:
                source.put_back([kept.retry(outcome)])
            else:
                kept.add(outcome)
        surplus = await runner.stop()
    except BaseException:  # ctrl-C, too: no request may outlive its rollout
        await runner.cancel()
        raise
    source.put_back(surplus)
    kept.stats.put_back(surplus)
    return kept.result(kept.groups)
