"""One group from pending to scored: what becomes of whoever waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.rollout.bench import Bench
from vime.rewards.pool import GraderPool
from vime.rollout.generate import rollout_sampling
from vime.rollout.runner import GroupRunner


@pytest.mark.parametrize("turns", range(12))
def test_who_waits_is_cancelled_at_any_moment_and_no_group_is_lost(
    tokenizer: Any, pool: GraderPool, turns: int
) -> None:
    async def outcome_while_cancelled() -> None:
        bench = Bench(tokenizer, pool)
        runner = GroupRunner(
            bench.context,
            bench.engines,
            sampling=rollout_sampling(bench.config),
            seed_of=lambda group: None,
            name="test",
            rollout_id=0,
            max_context_len=None,
            generate_path=None,
        )
        waiting = asyncio.create_task(runner.next_outcome())
        await asyncio.sleep(0)
        (group,) = bench.source.get_groups(1)
        group.is_finished = True  # its task ends at its first turn
        runner.start(group)
        for _ in range(turns):
            await asyncio.sleep(0)
        was_cancelled = waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() == was_cancelled
        assert len(await runner.stop()) == was_cancelled, "it was handed out, or can be put back"

    asyncio.run(outcome_while_cancelled())
