"""Requests that live through weight syncs."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import numpy as np
import pytest

from tests.rollout.stepped_engines import SteppedEngines, log_prob_of
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.rollout.continuing import ContinuingEngines, joined, rest_of
from vime.types import RoutedRows, SamplingSupport, VersionSpan


def request(name: str = "a", n: int = 1, prompt: int = 3, **sampling: object) -> GenerateRequest:
    params = SamplingParams(n=n, **({"max_tokens": 20, "seed": 7} | sampling))  # type: ignore[arg-type]
    return GenerateRequest(request_id=name, token_ids=tuple(range(prompt)), sampling=params)


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def sync(engines: ContinuingEngines, inner: SteppedEngines) -> None:
    await engines.interrupt()
    assert not inner.running, "weights would change under a request"
    inner.version += 1
    engines.go_on()
    await turns()


def test_every_span_is_of_the_version_that_it_names() -> None:
    async def scenario() -> list[Completion]:
        inner = SteppedEngines(lambda r: 9 - (len(r.token_ids) - 3))
        engines = ContinuingEngines(inner)
        asked = asyncio.create_task(engines.generate(request(n=2)))
        await turns()
        for tokens in (2, 0, 4):
            for _ in range(tokens):
                await inner._step()
            await sync(engines, inner)
        for _ in range(3):
            await inner._step()
        completions = await asked
        assert engines.take_num_continued() == 6 and engines.take_num_continued() == 0
        assert [r.sampling.n for r in inner.requests] == [2, *[1] * 6]
        assert len({r.request_id for r in inner.requests}) == 7
        assert len({r.sampling.seed for r in inner.requests}) == 5, "the one without a token draws the same again"
        return completions

    for completion in asyncio.run(scenario()):
        assert completion.finish_reason == "stop" and len(completion.token_ids) == 9
        assert [(s.version, s.start, s.end) for s in completion.weight_versions] == [(1, 0, 2), (3, 2, 6), (4, 6, 9)]
        for span in completion.weight_versions:
            for place in range(span.start, span.end):
                assert completion.log_probs[place] == log_prob_of(span.version, 3 + place)


def test_limits_hold_over_all_parts_together() -> None:
    begun = Completion(token_ids=(5,) * 6, log_probs=(-1.0,) * 6, finish_reason="abort", weight_versions=())
    rest = rest_of(request(max_tokens=8, min_tokens=7), begun, 1)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens, rest.sampling.n) == (2, 1, 1)
    assert rest.token_ids == (0, 1, 2, *[5] * 6)
    assert rest_of(request(seed=None), begun, 0).sampling.seed is None

    async def scenario() -> list[Completion]:
        inner = SteppedEngines(lambda r: 99)
        engines = ContinuingEngines(inner)
        asked = asyncio.create_task(engines.generate(request(max_tokens=3)))
        await turns()
        for _ in range(2):
            await inner._step()
            await sync(engines, inner)
        await inner._step()
        return await asked

    (completion,) = asyncio.run(scenario())
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


def test_what_comes_while_weights_change_waits_and_what_is_called_off_meanwhile_has_what_it_had() -> None:
    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion]]:
        inner = SteppedEngines(lambda r: 5)
        engines = ContinuingEngines(inner)
        begun = asyncio.create_task(engines.generate(request("begun")))
        await turns()
        await inner._step()
        await engines.interrupt()
        late = asyncio.create_task(engines.generate(request("late")))
        later = asyncio.create_task(engines.generate(request("later", n=2)))
        await turns()
        assert not inner.running
        await engines.abort(["begun", "late", "unknown"])
        results = await begun, await late
        engines.go_on()
        await turns()
        assert list(inner.running) == ["later"]
        for _ in range(5):
            await inner._step()
        return *results, await later

    begun, late, later = asyncio.run(scenario())
    assert (begun[0].finish_reason, len(begun[0].token_ids)) == ("abort", 1)
    assert (late[0].finish_reason, len(late[0].token_ids)) == ("abort", 0)
    assert [c.finish_reason for c in later] == ["stop", "stop"]


def test_an_abort_that_an_engine_makes_by_itself_is_its_answer() -> None:
    async def scenario() -> list[Completion]:
        inner = SteppedEngines()
        engines = ContinuingEngines(inner)
        asked = asyncio.create_task(engines.generate(request()))
        await turns()
        await inner.abort(["a"])
        return await asked

    assert asyncio.run(scenario())[0].finish_reason == "abort"


def test_a_failing_part_fails_the_request() -> None:
    class Failing(SteppedEngines):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            if self.requests:
                raise RuntimeError("gone")
            return await super().generate(request)

    async def scenario() -> None:
        inner = Failing()
        engines = ContinuingEngines(inner)
        asked = asyncio.create_task(engines.generate(request(n=3)))
        await turns()
        await sync(engines, inner)
        with pytest.raises(RuntimeError, match="gone"):
            await asked
        await engines.interrupt()

    asyncio.run(scenario())


def test_an_abort_that_comes_before_its_request_is_repeated() -> None:
    class Slow(SteppedEngines):
        """A request is on its way until the second abort."""

        num_aborts = 0

        async def abort(self, request_ids: object) -> None:
            self.num_aborts += 1
            if self.num_aborts > 1:
                await super().abort(request_ids)  # type: ignore[arg-type]

    async def scenario() -> None:
        inner = Slow()
        engines = ContinuingEngines(inner)
        asked = asyncio.create_task(engines.generate(request()))
        await turns()
        await sync(engines, inner)
        await inner._step()
        await inner._step()
        assert (await asked)[0].weight_versions == (VersionSpan(2, 0, 2),)

    asyncio.run(scenario())


def test_experts_of_both_parts_are_joined() -> None:
    def rows(start: int, count: int, value: int) -> RoutedRows:
        return RoutedRows(start, np.full((count, 2, 1), value, np.uint8))

    def part(n: int, routed: RoutedRows | None) -> Completion:
        return Completion(
            token_ids=(5,) * n, log_probs=(-1.0,) * n, finish_reason="abort", weight_versions=(), routed_experts=routed
        )

    first, ask = part(2, rows(0, 4, 1)), request()
    assert rest_of(ask, first, 0).routed_experts_start == 4 and rest_of(ask, part(0, None), 0).routed_experts_start == 0
    both = joined(first, part(3, rows(4, 3, 2))).routed_experts
    assert both is not None and both.start == 0 and both.rows[:, 0, 0].tolist() == [1] * 4 + [2] * 3
    assert joined(part(0, None), part(3, rows(0, 5, 2))).routed_experts is not None
    assert joined(first, part(3, None)).routed_experts is None, "of the later tokens they are not known"
    assert joined(first, part(0, None)).routed_experts is first.routed_experts


def test_what_could_have_been_sampled_stays_with_its_tokens() -> None:
    def part(rows: list[list[int]] | None, n: int) -> Completion:
        support = None if rows is None else SamplingSupport.of(rows)
        return Completion(
            token_ids=(5,) * n, log_probs=(-1.0,) * n, finish_reason="abort", weight_versions=(), support=support
        )

    both = joined(part([[5, 6], [5]], 2), part([[4, 5]], 1)).support
    assert both is not None and both.rows() == [[5, 6], [5], [4, 5]]
    assert joined(part(None, 2), part(None, 1)).support is None


def test_nothing_of_a_completion_is_forgotten_when_parts_are_joined() -> None:
    known = {"token_ids", "log_probs", "finish_reason", "weight_versions", "support", "routed_experts"}
    assert {f.name for f in fields(Completion)} == known, "join the new field in vime/rollout/continuing.py, too"
