"""Partial rollouts: the surplus keeps its tokens and is gone on with later."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes import FakeEngines, seeded_digits
from tests.rollout.bench import HOOKS, Bench, ids
from vime.protocols import GenerateRequest
from vime.rewards.pool import GraderPool
from vime.types import Group, RolloutResult, SampleStatus, VersionSpan


class Later:
    """Engines whose groups from the fifth on do not end in the first rollout, and have one token when aborted."""

    def __init__(self, first_slow: int = 4) -> None:
        self.version, self.first_slow = 0, first_slow
        self.engines = FakeEngines(lambda request, i: ([6, 7], "stop", self.version), self.before)

    async def before(self, request: GenerateRequest) -> None:
        if self.version:
            return
        group_id = int(request.request_id.removeprefix("goes-on-").removeprefix("rollout-0-").split("-")[0])
        if group_id >= self.first_slow:
            await asyncio.sleep(3600)


def second_rollout(bench: Bench, later: Later, tokenizer: Any, pool: GraderPool, **rollout: Any) -> RolloutResult:
    """The next rollout, under the next policy, of the groups put back and four others: nothing is left over."""
    later.version = 1
    options = {"partial_rollout": True, "rollout_batch_size": 6, **rollout}
    after = Bench(tokenizer, pool, later.engines, **options)
    after.source = bench.source
    return after.run(1)


def of_group(groups: list[Group], group_id: int) -> Group:
    return next(group for group in groups if group.group_id == group_id)


def test_the_surplus_keeps_its_tokens_and_goes_on_from_there(tokenizer: Any, pool: GraderPool) -> None:
    later = Later()
    bench = Bench(tokenizer, pool, later.engines, partial_rollout=True, over_sampling_batch_size=6)
    first = bench.run(0)
    assert ids(first) == [0, 1, 2, 3]
    assert first.metrics["rollout/num_put_back"] == 2
    assert first.metrics["rollout/num_put_back_tokens"] == 4
    bench.source.restore(json.loads(json.dumps(bench.source.state())))  # as a checkpoint keeps them
    num_before = len(later.engines.requests)
    second = second_rollout(bench, later, tokenizer, pool)
    assert ids(second)[:2] == [4, 5]
    sample = second.groups[0].samples[1]
    assert sample.response_tokens == (5, 6, 7)
    assert sample.rollout_log_probs == (-0.5, -0.5, -0.75)
    assert sample.loss_mask == (1, 1, 1)
    assert sample.weight_versions == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 3))
    assert sample.status is SampleStatus.COMPLETED and sample.reward is not None
    going_on = [r for r in later.engines.requests[num_before:] if r.request_id.startswith("rollout-1-4-")]
    assert [r.token_ids for r in going_on] == [(*sample.prompt_tokens, 5)] * 2
    assert {r.sampling.max_tokens for r in going_on} == {7} and {r.sampling.n for r in going_on} == {1}
    assert len({r.sampling.seed for r in going_on}) == 2
    assert second.metrics["rollout/num_continued_groups"] == 2
    assert second.metrics["rollout/num_offpolicy_tokens"] == 4


def test_old_tokens_are_masked_on_demand(tokenizer: Any, pool: GraderPool) -> None:
    later = Later()
    options = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "over_sampling_batch_size": 6}
    bench = Bench(tokenizer, pool, later.engines, **options)
    bench.run(0)
    second = second_rollout(bench, later, tokenizer, pool, mask_offpolicy_in_partial_rollout=True)
    sample = second.groups[0].samples[0]
    assert sample.loss_mask == (0, 1, 1)
    assert sample.rollout_log_probs == (-0.5, -0.5, -0.75)


def test_a_response_that_reached_its_limit_is_not_gone_on_with(tokenizer: Any, pool: GraderPool) -> None:
    later = Later()
    options = {"partial_rollout": True, "over_sampling_batch_size": 6, "rollout_max_response_len": 1}
    bench = Bench(tokenizer, pool, later.engines, **options)
    bench.run(0)
    sample = second_rollout(bench, later, tokenizer, pool, rollout_max_response_len=1).groups[0].samples[0]
    assert sample.response_tokens == (5,) and sample.status is SampleStatus.TRUNCATED


def test_a_finished_group_in_the_surplus_is_not_generated_again(tokenizer: Any, pool: GraderPool) -> None:
    options = {"partial_rollout": True, "over_sampling_batch_size": 6}
    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer)), **options)
    assert ids(bench.run(0)) == [0, 1, 2, 3]
    num_before = len(bench.engines.requests)
    kept = [sample.tokens for group in bench.source.get_groups(2) for sample in group.samples]
    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer)), **options)
    bench.run(0)
    assert num_before == 6
    second = bench.run(1)
    assert [sample.tokens for group_id in (4, 5) for sample in of_group(second.groups, group_id).samples] == kept
    assert not [r for r in bench.engines.requests if r.request_id.startswith(("rollout-1-4", "rollout-1-5"))]


def test_a_generate_function_goes_on_with_its_sample(tokenizer: Any, pool: GraderPool) -> None:
    later = Later()
    bench = Bench(
        tokenizer,
        pool,
        later.engines,
        custom_generate_function_path=f"{HOOKS}.goes_on",
        partial_rollout=True,
        over_sampling_batch_size=6,
        reward={},
    )
    bench.run(0)
    hook = f"{HOOKS}.goes_on"
    result = second_rollout(bench, later, tokenizer, pool, custom_generate_function_path=hook, reward={})
    group = of_group(result.groups, 4)
    assert [s.response_tokens for s in group.samples] == [(5, 6, 7, 6, 7)] * 2
    assert [s.metadata["turn"] for s in group.samples] == [2, 2]
    assert [s.reward for s in group.samples] == [0.0, 1.0]


def test_a_generate_function_that_ignores_the_abort_begins_again(
    tokenizer: Any, pool: GraderPool, caplog: pytest.LogCaptureFixture
) -> None:
    later = Later()
    bench = Bench(
        tokenizer,
        pool,
        later.engines,
        custom_generate_function_path=f"{HOOKS}.ignores_the_abort",
        partial_rollout=True,
        over_sampling_batch_size=5,
        reward={},
    )
    bench.run(0)
    (group,) = bench.source.get_groups(1)
    assert [(s.status, s.response_length, s.metadata) for s in group.samples] == [(SampleStatus.PENDING, 0, {})] * 2
    assert "ignores_the_abort ignored that its request was aborted" in caplog.text


def test_siblings_of_a_cut_off_episode_begin_again(tokenizer: Any, pool: GraderPool) -> None:
    later = Later()
    bench = Bench(
        tokenizer,
        pool,
        later.engines,
        custom_generate_function_path=f"{HOOKS}.fans_out_late",
        partial_rollout=True,
        over_sampling_batch_size=5,
        reward={},
    )
    assert [s.trajectory_id for s in bench.run(0).groups[1].samples] == [2, 2, 3, 3]
    (group,) = bench.source.get_groups(1)
    assert [(s.status, s.response_length) for s in group.samples] == [(SampleStatus.PENDING, 0)] * 2
