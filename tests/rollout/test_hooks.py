"""The contracts of the hooks that the rollout calls: what they are given, and what becomes of what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngines, char_tokenizer, seeded_digits
from tests.rollout.bench import HOOKS, Bench, ids
from vime.config import Config, RolloutConfig
from vime.errors import DataError, HookError, VimeError
from vime.loop.replay import NoPrompts
from vime.protocols import RolloutContext
from vime.rewards.pool import GraderPool
from vime.rollout import custom_generate
from vime.rollout.stage import RolloutStage
from vime.types import SampleStatus


def samples_of(result: Any) -> list[Any]:
    return [sample for group in result.groups for sample in group.samples]


def test_a_generate_function_is_told_whether_it_evaluates_if_it_takes_it(
    tokenizer: Any, pool: GraderPool, tmp_path: Path
) -> None:
    bench = Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.told_of_evaluation", reward={})
    assert {s.reward for s in samples_of(bench.run())} == {0.0}
    assert {s.reward for s in samples_of(bench.stage(tmp_path).evaluate(0))} == {1.0}


def test_a_generate_function_that_hangs_fails_its_sample_alone_and_names_the_line(
    tokenizer: Any, pool: GraderPool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(
        tokenizer,
        pool,
        custom_generate_function_path=f"{HOOKS}.hangs_on_some",
        custom_generate_timeout_s=0.2,
        rollout_all_samples_process_path=f"{HOOKS}.note_all",
    )
    result = bench.run()
    assert ids(result) == [0, 2, 3, 4]
    assert result.metrics["rollout/error_cat/generate_timeout"] == 1
    assert dict(tokenizer.seen[0])[1] == [SampleStatus.COMPLETED, SampleStatus.FAILED]
    assert "did not end within 0.2 s (--custom-generate-timeout-s); it was in hooks.py, line " in caplog.text
    assert "in hangs_on_some" in caplog.text


def test_a_generate_function_whose_environment_is_down_for_a_while_is_called_again_with_the_sample_as_it_was(
    tokenizer: Any, pool: GraderPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(custom_generate, "_FIRST_WAIT_S", 0.001)
    path, tokenizer.seen = f"{HOOKS}.fails_twice", []
    bench = Bench(tokenizer, pool, custom_generate_function_path=path, custom_generate_max_retries=2)
    result = bench.run()
    assert ids(result) == [0, 1, 2, 3]
    assert result.metrics["rollout/num_failed_groups"] == 0
    assert sorted(tokenizer.seen) == sorted([s.sample_id for s in samples_of(result)] * 3)
    assert "is generated again in 0.002 s" in caplog.text
    tokenizer.seen.clear()
    with pytest.raises(VimeError, match="the environment is down"):
        Bench(tokenizer, pool, custom_generate_function_path=path, custom_generate_max_retries=1).run()


def test_a_sample_names_its_own_generate_function(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool)
    groups = bench.source.get_groups(4)
    for sample in groups[2].samples:
        sample.metadata["generate_function_path"] = f"{HOOKS}.goes_on"
    bench.source.put_back(groups)
    result = bench.run()
    assert [s.metadata.get("turn") for s in samples_of(result)] == [None] * 4 + [2] * 2 + [None] * 2
    groups[1].samples[0].metadata["generate_function_path"] = f"{HOOKS}.nothing"
    bench.source.put_back(groups[1:2])
    with pytest.raises(DataError, match=r"sample 2: metadata.generate_function_path: .* has no nothing"):
        bench.run(1)


def test_sample_hooks_run_in_order_before_the_reward(tokenizer: Any, pool: GraderPool, tmp_path: Path) -> None:
    hooks = [f"{HOOKS}.append_id", f"{HOOKS}.label_is_response"]
    bench = Bench(tokenizer, pool, rollout_sample_hook_path=hooks)
    result = bench.run(7)
    for group in result.groups:
        for sample in group.samples:
            assert sample.response.endswith("|7t")
            assert sample.reward == 1.0
            assert (sample.group_id, sample.trajectory_id) == (group.group_id, sample.sample_id)
    assert all(s.response.endswith("|7e") for s in samples_of(bench.stage(tmp_path).evaluate(7)))


def test_a_sample_hook_that_raises_costs_its_group(tokenizer: Any, pool: GraderPool) -> None:
    result = Bench(tokenizer, pool, rollout_sample_hook_path=[f"{HOOKS}.sample_hook_that_raises"]).run()
    assert ids(result) == [0, 1, 2, 4]
    assert result.metrics["rollout/error_cat/sample_hook"] == 2
    words = r"sample_hook_that_gives_text returned .* \(str\), but a Sample or None is expected \(defined in hooks.py"
    with pytest.raises(VimeError, match=words):
        Bench(tokenizer, pool, rollout_sample_hook_path=[f"{HOOKS}.sample_hook_that_gives_text"]).run()


def test_a_sample_filter_marks_samples_and_all_groups_are_seen(pool: GraderPool) -> None:
    tokenizer = char_tokenizer()
    bench = Bench(
        tokenizer,
        pool,
        custom_generate_function_path=f"{HOOKS}.fails_on_some",
        dynamic_sampling_filter_path=f"{HOOKS}.keep_odd",
        rollout_sample_filter_path=f"{HOOKS}.remove_the_odd",
        rollout_all_samples_process_path=f"{HOOKS}.note_all",
    )
    result = bench.run()
    assert [s.remove_sample for s in samples_of(result)] == [False, True] * 4
    seen, source = tokenizer.seen
    assert source is bench.source
    assert set(ids(result)) == {1, 5, 7, 9}
    assert [group_id for group_id, _ in seen] == list(range(10))  # 3 failed, the even ones were dropped
    with pytest.raises(HookError, match=r"remove_by_text set remove_sample of sample 0 to 'yes'; a bool is expected"):
        Bench(tokenizer, pool, rollout_sample_filter_path=f"{HOOKS}.remove_by_text").run()


def test_log_functions_add_metrics_or_take_their_place(tokenizer: Any, pool: GraderPool, tmp_path: Path) -> None:
    bench = Bench(
        tokenizer,
        pool,
        custom_rollout_log_function_path=f"{HOOKS}.log_and_skip",
        custom_eval_rollout_log_function_path=f"{HOOKS}.log_eval",
    )
    stage = bench.stage(tmp_path)
    assert stage.generate(3).metrics == {"custom/groups": 7.0, "custom/took_time": 1.0}
    metrics = stage.evaluate(3).metrics
    assert metrics["custom/eval_groups"] == 2 and "eval/held" in metrics
    bench = Bench(tokenizer, pool, custom_rollout_log_function_path=f"{HOOKS}.log_text")
    with pytest.raises(HookError, match=r"log_text set the metric 'custom/model' to 'small'; a number is expected"):
        RolloutStage(bench.context, bench.source, {}).generate(0)


def test_a_rollout_function_of_ones_own_is_called_for_training_and_evaluation(tokenizer: Any) -> None:
    engines = FakeEngines(seeded_digits(tokenizer))

    def stage(name: str) -> RolloutStage:
        config = Config(rollout=RolloutConfig(rollout_function_path=f"{HOOKS}.{name}"))
        source = NoPrompts()  # nobody asks it for prompts
        return RolloutStage(RolloutContext(config, engines, tokenizer, reward=None), source, {})  # type: ignore[arg-type]

    assert stage("rollout_of_one").generate(0).metrics == {"custom/evaluation": 0.0}
    assert stage("rollout_of_one").evaluate(0).metrics == {"custom/evaluation": 1.0}
    with pytest.raises(HookError, match=r"rollout_of_a_list returned \[\] \(list\), but a RolloutResult"):
        stage("rollout_of_a_list").generate(0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"rollout_sample_filter_path": f"{HOOKS}.drop_a_sample"}, "drop_a_sample added, took out or exchanged"),
        (
            {"custom_rollout_log_function_path": f"{HOOKS}.log_and_double"},
            "log_and_double added, took out or exchanged",
        ),
        ({"rollout_function_path": f"{HOOKS}.rollout_of_twins"}, "rollout_of_twins returned group 0 twice"),
        ({"reward": {"custom_rm_path": f"{HOOKS}.reward_that_moves"}}, "sample 0 in group 0, but its group_id is 5"),
    ],
)
def test_no_hook_takes_doubles_or_moves_a_sample(
    tokenizer: Any, pool: GraderPool, tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(HookError, match=words):
        Bench(tokenizer, pool, **flags).stage(tmp_path).generate(0)
