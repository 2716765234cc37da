"""The default rollout function on engines without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import FakeEngines, char_tokenizer, seeded_digits
from tests.rollout.bench import HOOKS, Bench, contents, ids
from vime.errors import ConfigError, EngineError, VimeError
from vime.observability.metrics import check_names
from vime.protocols import GenerateRequest
from vime.rewards.pool import GraderPool
from vime.types import Sample, SampleStatus


def shuffled_delays(request: GenerateRequest) -> Any:
    """Requests end in another order than they started."""
    return asyncio.sleep(0.001 * (int(request.request_id.split("-")[-1]) * 7 % 5))


def in_groups_of(n: int) -> Callable[[GenerateRequest], Any]:
    """Each request waits until it is one of n that run."""
    barrier = asyncio.Barrier(n)

    async def before(request: GenerateRequest) -> None:
        async with asyncio.timeout(60):
            await barrier.wait()

    return before


def test_one_request_a_group_gives_scored_samples_in_order(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer, 1), shuffled_delays))
    result = bench.run()
    assert ids(result) == [0, 1, 2, 3]
    assert [r.sampling.n for r in bench.engines.requests] == [2] * 4
    for group in result.groups:
        for sample in group.samples:
            assert sample.status is SampleStatus.COMPLETED
            assert sample.tokens[:2] == tuple(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
            assert sample.response_length == 2
            assert sample.response == tokenizer.decode(sample.response_tokens[:1])
            assert sample.reward == float(sample.response == sample.label)
            assert sample.rollout_log_probs == (-0.5, -0.75)
            assert sample.weight_versions[0].version == 0
    rewards = [s.reward for g in result.groups for s in g.samples]
    assert result.metrics["rollout/raw_reward"] == pytest.approx(sum(rewards) / 8)
    assert result.metrics["rollout/response_len/mean"] == 2
    assert result.metrics["rollout/num_groups"] == 4
    assert result.metrics["rollout/num_put_back"] == 0
    assert bench.engines.num_closed == 1


def test_the_parts_of_a_reward_are_reported(tokenizer: Any, pool: GraderPool) -> None:
    reward = {"rm_parts": {"exact_match": 1.0, "random": 0.5}, "reward_key": "total"}
    result = Bench(tokenizer, pool, reward=reward).run()
    check_names(result.metrics)
    rewards = [s.reward for group in result.groups for s in group.samples]
    for part in ("exact_match", "random", "total"):
        mean = sum(r[part] for r in rewards if isinstance(r, dict)) / len(rewards)
        assert result.metrics[f"rollout/reward/{part}"] == pytest.approx(mean)
    assert result.metrics["rollout/raw_reward"] == pytest.approx(result.metrics["rollout/reward/total"])
    assert result.metrics["rollout/reward/random"] > 0


def test_the_same_run_gives_the_same_samples_and_other_rollouts_others(tokenizer: Any, pool: GraderPool) -> None:
    first = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer), shuffled_delays)).run(3)
    fast = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer))).run(3)
    other = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer))).run(4)
    assert contents(first.groups) == contents(fast.groups)
    assert contents(first.groups) != contents(other.groups)


def test_seeds_differ_by_group_and_fit_any_reader(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool)
    bench.run(0)
    bench.run(1)
    seeds = [request.sampling.seed for request in bench.engines.requests]
    assert len(set(seeds)) == 8
    assert all(seed is not None and 0 <= seed < 2**53 for seed in seeds)


def test_nobody_makes_a_text_of_the_samples(tokenizer: Any, pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as a part of their generation; asyncio.run does so with what it returns."""
    monkeypatch.setattr(Sample, "__repr__", lambda sample: pytest.fail("a text was made of a sample"))
    assert len(Bench(tokenizer, pool).run(0).groups) == 4


def test_requests_have_no_seed_where_engines_are_to_draw_from_one_stream(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, FakeEngines(lambda request, index: ([5], "stop")), rollout_request_seeds=False)
    bench.run(0)
    assert {request.sampling.seed for request in bench.engines.requests} == {None}


def test_concurrency_is_bounded(tokenizer: Any, pool: GraderPool) -> None:
    engines = FakeEngines(seeded_digits(tokenizer), in_groups_of(3))
    bench = Bench(tokenizer, pool, engines, rollout_batch_size=9, rollout_concurrency=3)
    bench.run()
    assert bench.engines.max_running == 3


def test_responses_are_limited_by_the_context(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, rollout_max_context_len=5)
    bench.run()
    assert {r.sampling.max_tokens for r in bench.engines.requests} == {3}


def test_truncated_samples_are_marked_and_counted(tokenizer: Any, pool: GraderPool) -> None:
    engines = FakeEngines(lambda request, i: ([5, 6], "length" if i else "stop"))
    result = Bench(tokenizer, pool, engines).run()
    assert [s.status for s in result.groups[0].samples] == [SampleStatus.COMPLETED, SampleStatus.TRUNCATED]
    assert result.metrics["rollout/truncated_ratio"] == 0.5


def test_the_surplus_is_aborted_and_put_back_as_it_was(tokenizer: Any, pool: GraderPool) -> None:
    async def slow_from_the_fifth(request: GenerateRequest) -> None:
        if int(request.request_id.split("-")[-1]) >= 4:
            await asyncio.sleep(3600)

    bench = Bench(
        tokenizer,
        pool,
        FakeEngines(seeded_digits(tokenizer), slow_from_the_fifth),
        over_sampling_batch_size=8,
        rollout_concurrency=6,  # groups 6 and 7 never become requests
    )
    fresh = Bench(tokenizer, pool).source.get_groups(8)[4:]
    result = bench.run()
    assert ids(result) == [0, 1, 2, 3]
    assert result.metrics["rollout/num_put_back"] == 4
    assert {"rollout-0-4", "rollout-0-5"} <= set(bench.engines.aborted)
    assert contents(bench.source.get_groups(4)) == contents(fresh)


def test_requests_that_ignore_an_abort_are_cancelled(
    tokenizer: Any, pool: GraderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.rollout.runner._SWEEP_S", 0.01)

    class Deaf(FakeEngines):
        async def generate(self, request: GenerateRequest) -> Any:
            if int(request.request_id.split("-")[-1]) >= 4:
                await asyncio.sleep(3600)
            return await super().generate(request)

        async def abort(self, request_ids: Any) -> None:
            self.aborted += request_ids
            if len(self.aborted) > 4:
                raise EngineError("no answer")

    bench = Bench(tokenizer, pool, Deaf(seeded_digits(tokenizer)), over_sampling_batch_size=6)
    assert bench.run().metrics["rollout/num_put_back"] == 2
    assert [group.group_id for group in bench.source.get_groups(2)] == [4, 5]


def test_dropped_groups_are_replaced_and_counted(tokenizer: Any, pool: GraderPool) -> None:
    def right_for_even(request: GenerateRequest, index: int) -> tuple[list[int], str]:
        group_id = int(request.request_id.split("-")[-1])
        right = request.token_ids[0]  # the prompt is "<label>="
        wrong = tokenizer.convert_tokens_to_ids("x")
        return [right if index == 0 or group_id % 2 else wrong], "stop"

    bench = Bench(
        tokenizer,
        pool,
        FakeEngines(right_for_even),
        dynamic_sampling_filter_path="vime.rollout.filters.check_reward_nonzero_std",
    )
    result = bench.run()
    assert ids(result) == [0, 2, 4, 6]
    assert result.metrics["rollout/dynamic_filter/drop_zero_std_1"] == 3
    assert result.metrics["rollout/zero_std/count_1"] == 3
    assert result.metrics["rollout/num_groups"] == 7
    assert result.metrics["rollout/raw_reward"] == 0.5
    assert result.metrics["rollout/generated_reward"] == pytest.approx(10 / 14)


def test_a_filter_may_answer_with_a_bool(tokenizer: Any, pool: GraderPool) -> None:
    result = Bench(tokenizer, pool, dynamic_sampling_filter_path=f"{HOOKS}.keep_odd").run()
    assert ids(result) == [1, 3, 5, 7]
    assert result.metrics["rollout/dynamic_filter/drop_filtered"] >= 3


def test_a_filter_that_drops_everything_ends_the_rollout(tokenizer: Any, pool: GraderPool) -> None:
    with pytest.raises(VimeError, match="dropped all of 80 groups"):
        Bench(tokenizer, pool, dynamic_sampling_filter_path=f"{HOOKS}.keep_none").run()


def test_unusable_hooks_are_refused(tokenizer: Any, pool: GraderPool) -> None:
    with pytest.raises(VimeError, match="plain function"):
        Bench(tokenizer, pool, dynamic_sampling_filter_path=f"{HOOKS}.async_filter").run()
    with pytest.raises(ConfigError, match="has no nothing"):
        Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.nothing").run()


def failing(when: Callable[[GenerateRequest], bool]) -> Callable[[GenerateRequest], Any]:
    async def before(request: GenerateRequest) -> None:
        if when(request):
            raise EngineError(f"no answer to {request.request_id}")

    return before


def test_failed_groups_are_replaced_and_counted(tokenizer: Any, pool: GraderPool) -> None:
    engines = FakeEngines(seeded_digits(tokenizer), failing(lambda r: r.request_id.endswith(("-1", "-4"))))
    result = Bench(tokenizer, pool, engines).run()
    assert ids(result) == [0, 2, 3, 5]
    assert result.metrics["rollout/num_failed_groups"] == 2
    assert result.metrics["rollout/error_cat/generate"] == 4
    assert result.metrics["rollout/failed_ratio"] == pytest.approx(4 / 12)


def test_engines_that_always_fail_end_the_rollout_with_the_first_error(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer), failing(lambda r: True)))
    with pytest.raises(EngineError, match=r"3 groups failed while 0 of 4 .* no answer to rollout-0-0") as caught:
        bench.run()
    assert isinstance(caught.value.__cause__, EngineError)
    assert bench.engines.num_running == 0


def test_answers_that_break_the_contract_fail_the_group(tokenizer: Any, pool: GraderPool) -> None:
    for answer, problem in (
        (lambda request, i: ([5], "eos"), "'eos'"),
        (lambda request, i: ([5], "content_filter"), "content_filter"),
    ):
        with pytest.raises(EngineError, match=problem):
            Bench(tokenizer, pool, FakeEngines(answer)).run()

    class Few(FakeEngines):
        async def generate(self, request: GenerateRequest) -> Any:
            return (await super().generate(request))[:1]

    with pytest.raises(EngineError, match="asked for 2 samples and got 1"):
        Bench(tokenizer, pool, Few(seeded_digits(tokenizer))).run()


def test_groups_aborted_from_outside_are_tried_again(tokenizer: Any, pool: GraderPool) -> None:
    aborted: list[str] = []

    def answer(request: GenerateRequest, index: int) -> tuple[list[int], str]:
        if request.request_id.endswith("-2") and aborted.count(request.request_id) < 2:
            aborted.append(request.request_id)
            return [5], "abort"
        return [5], "stop"

    result = Bench(tokenizer, pool, FakeEngines(answer)).run()
    assert ids(result) == [0, 1, 2, 3]
    assert all(s.response_length == 1 for g in result.groups for s in g.samples)
    assert result.metrics["rollout/num_aborted_groups"] == 1
    with pytest.raises(EngineError, match="aborted 17 groups that nobody asked"):
        Bench(tokenizer, pool, FakeEngines(lambda request, i: ([5], "abort"))).run()


def test_a_custom_generate_function_runs_once_a_sample(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(
        tokenizer,
        pool,
        FakeEngines(seeded_digits(tokenizer, 1), in_groups_of(2)),
        custom_generate_function_path=f"{HOOKS}.two_turns",
        rollout_concurrency=2,
        reward={},
    )
    result = bench.run()
    assert ids(result) == [0, 1, 2, 3]
    assert len(bench.engines.requests) == 16
    assert bench.engines.max_running == 2
    assert len({r.sampling.seed for r in bench.engines.requests}) == 8  # one per sample, the same in both turns
    sample = result.groups[0].samples[1]
    assert sample.loss_mask == (1, 1, 0, 1, 1)
    assert sample.reward == 1.0


def test_siblings_share_group_and_trajectory(tokenizer: Any, pool: GraderPool) -> None:
    result = Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.fan_out", reward={}).run()
    group = result.groups[1]
    assert [s.trajectory_id for s in group.samples] == [2, 2, 3, 3]
    assert {s.group_id for s in group.samples} == {1}
    assert [s.reward for s in group.samples] == [0.0, 1.0, 0.0, 1.0]
    uneven = "tests.rollout.test_evaluate.one_or_two"
    result = Bench(tokenizer, pool, custom_generate_function_path=uneven, reward={}).run()
    assert result.metrics["rollout/raw_reward"] == 0.75, "rewards (1, 0) and (1) of two trajectories"


def test_an_aborted_episode_is_tried_again_without_its_siblings(pool: GraderPool) -> None:
    tokenizer = char_tokenizer()
    tokenizer.aborted_samples = set()
    hook = f"{HOOKS}.fan_out_aborted_once"
    result = Bench(tokenizer, pool, custom_generate_function_path=hook, reward={}).run()
    assert ids(result) == [0, 1, 2, 3]
    assert [s.trajectory_id for s in result.groups[1].samples] == [2, 2, 3, 3]


def test_a_reward_leaves_no_trace_in_a_group_that_is_put_back(tokenizer: Any, pool: GraderPool) -> None:
    reward = {"custom_rm_path": f"{HOOKS}.reward_that_notes"}
    bench = Bench(tokenizer, pool, over_sampling_batch_size=5, reward=reward)
    fresh = Bench(tokenizer, pool).source.get_groups(5)[4:]
    assert ids(bench.run()) == [0, 1, 2, 3]
    assert contents(bench.source.get_groups(1)) == contents(fresh)


def test_a_generate_function_that_raises_costs_its_group(tokenizer: Any, pool: GraderPool) -> None:
    result = Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.fails_on_some").run()
    assert ids(result) == [0, 1, 2, 4]
    with pytest.raises(VimeError, match="left sample 0 pending"):
        Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.leaves_pending").run()


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("twice", "one Sample twice"),
        ("status", "the status 'done'"),
        ("metadata", "metadata of type NoneType"),
        ("token", "token ids lie between -5 and 3"),
        ("shared", r"returned one Sample for both sample 0 and sample 1"),
        ("float", "tokens must be whole numbers"),
        ("exit", r"answers_wrongly raised SystemExit: 0"),
        ("cancel", r"answers_wrongly raised CancelledError"),
        ("long", "67 tokens long, above the 32 of --rollout-max-context-len"),
        ("reward", "the reward is 'good'; a finite number"),
        ("nan", "the reward is nan; a finite number"),
        ("large", r"the reward is 1e\+200; numbers up to 1e\+38 are taken"),
    ],
)
def test_a_generate_function_that_breaks_its_contract_fails_the_group(
    tokenizer: Any, pool: GraderPool, deed: str, words: str
) -> None:
    hook = f"{HOOKS}.answers_wrongly"
    tokenizer.made = {}
    with pytest.raises(VimeError, match=words):
        Bench(
            tokenizer, pool, custom_generate_function_path=hook, rollout_stop=[deed], rollout_max_context_len=32
        ).run()


def test_an_error_of_a_users_function_says_where_it_was_raised(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, dynamic_sampling_filter_path=f"{HOOKS}.filter_that_raises")
    with pytest.raises(VimeError, match=r"raised LookupError: a bug \(hooks\.py, line \d+, in filter_that_raises\)"):
        bench.run()


def test_a_filter_that_gives_no_verdict_is_an_error(tokenizer: Any, pool: GraderPool) -> None:
    with pytest.raises(VimeError, match=r"returned no \(str\), but a bool or a FilterOutput .*\(defined in hooks"):
        Bench(tokenizer, pool, dynamic_sampling_filter_path=f"{HOOKS}.filter_that_says_no").run()


def test_it_is_said_what_a_quiet_rollout_waits_for(
    tokenizer: Any, pool: GraderPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.rollout.runner._QUIET_S", 0.05)

    async def until_it_is_said(request: GenerateRequest) -> None:
        async with asyncio.timeout(60):
            while "no group finished" not in caplog.text:
                await asyncio.sleep(0.005)

    Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer), until_it_is_said)).run()
    assert "rollout-0: no group finished for 0.05 s; 4 wait for the engines, 0 are in" in caplog.text


def test_a_cancelled_generate_function_leaves_no_trace_in_the_group(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(
        tokenizer,
        pool,
        custom_generate_function_path=f"{HOOKS}.slow_for_large_groups",
        over_sampling_batch_size=6,
    )
    fresh = Bench(tokenizer, pool).source.get_groups(6)[4:]
    assert ids(bench.run()) == [0, 1, 2, 3]
    assert contents(bench.source.get_groups(2)) == contents(fresh)


def test_a_reward_that_is_no_number_costs_its_group(tokenizer: Any, pool: GraderPool) -> None:
    result = Bench(tokenizer, pool, reward={"custom_rm_path": f"{HOOKS}.nan_on_some"}).run()
    assert ids(result) == [0, 1, 2, 4]
    assert result.metrics["rollout/error_cat/reward"] == 2
    bench = Bench(tokenizer, pool, reward={"custom_rm_path": f"{HOOKS}.nan_on_some"})
    for group in bench.source.get_groups(10):
        for sample in group.samples:
            sample.label = "3"
        bench.source.put_back([group])
    with pytest.raises(
        VimeError,
        match=r"3 groups failed .* reward: RewardError: .* no reward: the reward is nan",
    ):
        bench.run()


def test_nothing_outlives_a_rollout_that_is_interrupted(tokenizer: Any, pool: GraderPool) -> None:
    async def interrupt(request: GenerateRequest) -> None:
        if request.request_id.endswith("-2"):
            raise KeyboardInterrupt
        await asyncio.sleep(3600)

    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer), interrupt))
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert bench.engines.num_running == 0
