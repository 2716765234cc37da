"""The experts that engines report stay with the tokens that they were used for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes import FakeEngines
from tests.rollout.bench import HOOKS, Bench
from tests.rollout.test_evaluate import make_config, run
from tests.rollout.test_partial import Later, of_group, second_rollout
from vime.protocols import Completion, GenerateRequest
from vime.rewards.pool import GraderPool
from vime.types import RoutedRows, Sample


class Reporting(FakeEngines):
    """Engines whose rows say which token they are of, and of which version the answer was: [[token, version]]."""

    def __init__(self, inner: FakeEngines, version: Callable[[], int] = lambda: 0) -> None:
        super().__init__(inner._answer, inner._before)
        self._version = version

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        answers = await super().generate(request)
        start = request.routed_experts_start
        if start is None:
            return answers
        tokens = [(*request.token_ids, *answer.token_ids)[start:-1] for answer in answers]
        rows = [np.array([[[t, self._version()]] for t in of_one], np.uint8).reshape(-1, 1, 2) for of_one in tokens]
        return [replace(a, routed_experts=RoutedRows(start, r)) for a, r in zip(answers, rows, strict=True)]


def reported(sample: Sample) -> tuple[list[int], list[int]]:
    """The tokens that rows are of, and the versions that reported them."""
    assert sample.routed_experts is not None
    return sample.routed_experts[:, 0, 0].tolist(), sample.routed_experts[:, 0, 1].tolist()


def test_a_groups_request_gives_each_sample_rows_of_its_own(tokenizer: Any, pool: GraderPool) -> None:
    engines = Reporting(FakeEngines(lambda request, i: ([6, 7 + i], "stop")))
    result = Bench(tokenizer, pool, engines).run()
    assert {request.routed_experts_start for request in engines.requests} == {0}
    for group in result.groups:
        for sample in group.samples:
            assert reported(sample)[0] == list(sample.tokens[:-1])


def test_turns_join_their_rows_with_those_of_what_a_tool_wrote(tokenizer: Any, pool: GraderPool) -> None:
    engines = Reporting(FakeEngines(lambda request, i: ([5, 6], "stop")))
    result = Bench(tokenizer, pool, engines, custom_generate_function_path=f"{HOOKS}.two_turns", reward={}).run()
    sample = result.groups[0].samples[0]
    assert sample.response_tokens == (5, 6, 7, 5, 6) and sample.loss_mask == (1, 1, 0, 1, 1)
    assert reported(sample)[0] == list(sample.tokens[:-1])


def test_a_rollout_gone_on_with_keeps_the_rows_of_the_policy_that_sampled(tokenizer: Any, pool: GraderPool) -> None:
    later = Later()
    later.engines = Reporting(later.engines, lambda: later.version)
    bench = Bench(tokenizer, pool, later.engines, partial_rollout=True, over_sampling_batch_size=6)
    bench.run(0)
    bench.source.restore(json.loads(json.dumps(bench.source.state())))  # as a checkpoint keeps them
    num_before = len(later.engines.requests)
    sample = of_group(second_rollout(bench, later, tokenizer, pool).groups, 4).samples[1]
    num_prompt = len(sample.prompt_tokens)
    # Token 5 was sampled under version 0, and fed to the model under version 1: with the prompt of the second request.
    assert reported(sample) == (list(sample.tokens[:-1]), [0] * num_prompt + [1] * 2)
    going_on = [r for r in later.engines.requests[num_before:] if r.request_id.startswith("rollout-1-4-")]
    assert [r.routed_experts_start for r in going_on] == [num_prompt] * 2


def test_evaluation_asks_for_no_experts(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    engines = Reporting(FakeEngines(lambda request, i: ([5], "stop")))
    result = run(make_config(tmp_path), engines, tokenizer, pool)
    assert {request.routed_experts_start for request in engines.requests} == {None}
    assert all(sample.routed_experts is None for group in result.groups for sample in group.samples)
