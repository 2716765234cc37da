"""Held-out evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngines
from vime.config import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from vime.errors import ConfigError, DataError, EngineError
from vime.observability.metrics import check_names
from vime.protocols import GenerateRequest, RolloutContext, SamplingParams
from vime.rewards.pool import GraderPool
from vime.rewards.score import make_reward_function
from vime.rollout.eval_data import load_eval_sets
from vime.rollout.evaluate import set_metrics
from vime.rollout.stats import pass_at_k
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import Group, RolloutResult, Sample, SampleStatus


def make_config(folder: Path, **settings: Any) -> Config:
    for name, labels in (("small", "0123"), ("large", "45678901")):
        lines = [json.dumps({"input": f"{i}=", "label": label}) for i, label in enumerate(labels)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    pairs = ["small", str(folder / "small.jsonl"), "large", str(folder / "large.jsonl")]
    return Config(
        data=DataConfig(label_key="label"),
        rollout=RolloutConfig(rollout_batch_size=1, rollout_max_response_len=4),
        reward=RewardConfig(rm_type="exact_match"),
        eval=EvalConfig(**({"eval_prompt_data": pairs} | settings)),
    )


def run(config: Config, engines: FakeEngines, tokenizer: Any, pool: GraderPool, rollout_id: int = 0) -> RolloutResult:
    context = RolloutContext(config, engines, tokenizer, make_reward_function(config.reward, pool))
    result = generate_rollout(context, rollout_id, load_eval_sets(config, tokenizer), engines, evaluation=True)
    check_names(result.metrics)
    return result


def echo(request: GenerateRequest, index: int) -> tuple[list[int], str]:
    """Repeats the prompt's first digit, and from the second sample on something else."""
    return ([request.token_ids[0]] if index == 0 else [3, 3]), ("stop" if index == 0 else "length")


async def rank_reward(config: RolloutContext, samples: list[Sample]) -> list[dict[str, float]]:
    """Scores a whole group: place from behind, and how many there are."""
    return [{"place": float(i), "size": float(len(samples))} for i in range(len(samples))]


def test_groups_are_scored_as_groups_in_evaluation(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    reward = RewardConfig(custom_rm_path="tests.rollout.test_evaluate.rank_reward", group_rm=True, reward_key="size")
    config = make_config(tmp_path, n_samples_per_eval_prompt=3, eval_reward_key="place")
    result = run(replace(config, reward=reward), FakeEngines(echo), tokenizer, pool)
    assert result.metrics["eval/small"] == 1.0
    assert result.metrics["eval/small-reward/place"] == 1.0
    assert result.metrics["eval/large-reward/size"] == 3.0
    assert result.metrics["eval/small-failed_ratio"] == 0


def test_every_set_gets_its_own_metrics(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    engines = FakeEngines(echo)
    result = run(make_config(tmp_path, eval_temperature=0.0), engines, tokenizer, pool)
    assert result.metrics["eval/small"] == 1.0
    assert result.metrics["eval/large"] == 0.0
    assert result.metrics["eval/small-num_prompts"] == 4
    assert result.metrics["eval/large-response_len/mean"] == 1
    assert result.metrics["eval/large-truncated_ratio"] == 0
    assert result.metrics["eval/large-reward_unparseable"] == 0
    assert not any("pass@" in name for name in result.metrics)
    assert [g.samples[0].metadata["eval_set"] for g in result.groups] == ["small"] * 4 + ["large"] * 8
    assert {(r.sampling.temperature, r.sampling.seed) for r in engines.requests} == {(0.0, None)}
    assert engines.num_closed == 1


def test_sampling_settings_default_to_the_rollouts(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    engines = FakeEngines(echo)
    run(make_config(tmp_path), engines, tokenizer, pool)
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in engines.requests} == {(1.0, 4)}
    seeds = [r.sampling.seed for r in engines.requests]
    again = FakeEngines(echo)
    run(make_config(tmp_path, eval_max_response_len=3), again, tokenizer, pool, rollout_id=7)
    assert {r.sampling.max_tokens for r in again.requests} == {3}
    assert sorted(map(str, seeds)) == sorted(str(r.sampling.seed) for r in again.requests)


def test_pass_at_k_of_several_samples(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    result = run(make_config(tmp_path, n_samples_per_eval_prompt=4), FakeEngines(echo), tokenizer, pool)
    assert result.metrics["eval/small"] == 0.25
    assert result.metrics["eval/small-truncated_ratio"] == 0.75
    assert result.metrics["eval/small-pass@1"] == pytest.approx(0.25)
    assert result.metrics["eval/small-pass@2"] == pytest.approx(0.5)
    assert result.metrics["eval/small-pass@4"] == pytest.approx(1.0)
    assert result.metrics["eval/small-num_samples"] == 16


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_failed_samples_count_as_zero_and_many_of_a_set_stop_the_run(
    tmp_path: Path, tokenizer: Any, pool: GraderPool
) -> None:
    def failing(*groups: int) -> FakeEngines:
        async def before(request: GenerateRequest) -> None:
            if int(request.request_id.split("-")[-1]) in groups:
                raise EngineError("no answer")

        return FakeEngines(echo, before)

    result = run(make_config(tmp_path), failing(0), tokenizer, pool)
    assert result.metrics["eval/small"] == 0.75
    assert result.metrics["eval/small-failed_ratio"] == 0.25
    with pytest.raises(
        EngineError, match="2 of 4 prompts of the held-out set small failed; the first: EngineError: no"
    ):
        run(make_config(tmp_path), failing(0, 1), tokenizer, pool)  # only a sixth of all prompts
    aborting = FakeEngines(lambda request, i: ([5], "abort" if request.request_id.endswith("-1") else "stop"))
    assert run(make_config(tmp_path), aborting, tokenizer, pool).metrics["eval/small-failed_ratio"] == 0.25


def test_set_names_and_pairs_are_checked(tmp_path: Path, tokenizer: Any) -> None:
    for words, problem in (
        (["only"], "pairs of NAME PATH, but got 1 words"),
        (["a/b", "x"], "holds a slash"),
        (["a", "x", "a", "y"], "two held-out sets are called a"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_eval_sets(make_config(tmp_path, eval_prompt_data=words), tokenizer)
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        load_eval_sets(make_config(tmp_path, eval_prompt_data=["a", str(tmp_path / "missing.jsonl")]), tokenizer)
    assert load_eval_sets(make_config(tmp_path, eval_prompt_data=[]), tokenizer) == {}


def test_a_held_out_prompt_without_room_for_an_answer_is_refused_not_dropped(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, eval_max_context_len=3)
    assert len(load_eval_sets(config, tokenizer)["small"]) == 4
    (tmp_path / "small.jsonl").write_text('{"input": "1=", "label": "1"}\n{"input": "10=", "label": "1"}')
    with pytest.raises(DataError, match=r"held-out set small: 1 prompts of .*small\.jsonl leave no room"):
        load_eval_sets(config, tokenizer)


def test_held_out_keys_may_differ(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"q": "1", "a": "2"}')
    config = make_config(tmp_path, eval_prompt_data=["s", str(path)], eval_input_key="q", eval_label_key="a")
    assert load_eval_sets(config, tokenizer)["s"][0].label == "2"


def test_each_set_has_settings_of_its_own(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    """Sampling, keys, grader, generate function, metadata, dropped prompts: all by set, in one evaluation."""
    (tmp_path / "other.jsonl").write_text(
        '{"q": "12=", "a": "2", "metadata": {"rm_type": "math"}}\n{"q": "1234=", "a": "5"}'
    )
    (tmp_path / "sets.yaml").write_text(
        f"""
eval:
  defaults: {{temperature: 0.5, max_response_len: 3}}
  datasets:
    - name: other
      path: {tmp_path / "other.jsonl"}
      input_key: q
      label_key: a
      rm_type: gsm8k
      n_samples_per_eval_prompt: 2
      temperature: 0.25
      top_p: 0.5
      top_k: 7
      min_new_tokens: 1
      stop: ["!"]
      stop_token_ids: [9]
      max_prompt_len: 3
      metadata_overrides: {{split: test, notes: []}}
    - {{name: turns, path: {tmp_path / "small.jsonl"}, custom_generate_function_path: tests.rollout.hooks.two_turns}}
"""
    )
    engines = FakeEngines(echo)
    config = make_config(tmp_path, eval_config=str(tmp_path / "sets.yaml"), eval_temperature=0.75)
    result = run(config, engines, tokenizer, pool)
    of = {r.sampling.temperature: r.sampling for r in engines.requests}
    assert of[0.75].max_tokens == 4 and of[0.75].top_p == 1.0, "sets of --eval-prompt-data know the flags only"
    assert of[0.5].max_tokens == 3 and of[0.5].n == 1, "the file's defaults"
    own = of[0.25]
    assert (own.n, own.top_p, own.top_k, own.min_tokens, own.max_tokens) == (2, 0.5, 7, 1, 3)
    assert (own.stop, own.stop_token_ids) == (("!",), (9,))
    assert result.metrics["eval/other-num_dropped_prompts"] == 1
    assert result.metrics["eval/other-num_samples"] == 2
    (other,) = [g for g in result.groups if g.samples[0].metadata["eval_set"] == "other"]
    assert [s.metadata["rm_type"] for s in other.samples] == ["gsm8k"] * 2, "over the line's own"
    assert other.samples[0].metadata["split"] == "test"
    other.samples[0].metadata["notes"].append("mine")
    assert other.samples[1].metadata["notes"] == [], "siblings share no object that a hook may write into"
    turns = [s for g in result.groups for s in g.samples if s.metadata["eval_set"] == "turns"]
    assert {s.loss_mask.count(0) for s in turns} == {1}, "the tool's token"
    assert sorted(s.sample_id for g in result.groups for s in g.samples) == list(range(4 + 8 + 2 + 4))


def test_a_sets_samples_do_not_depend_on_the_sets_beside_it(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    both, alone = FakeEngines(echo), FakeEngines(echo)
    config = make_config(tmp_path)
    run(config, both, tokenizer, pool)
    run(make_config(tmp_path, eval_prompt_data=config.eval.eval_prompt_data[2:]), alone, tokenizer, pool)
    assert {r.sampling.seed for r in alone.requests} < {r.sampling.seed for r in both.requests}


def test_group_rewards_score_whole_groups(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    config = make_config(tmp_path, n_samples_per_eval_prompt=4)
    reward = RewardConfig(custom_rm_path="tests.rollout.hooks.first_is_best", group_rm=True)
    result = run(replace(config, reward=reward), FakeEngines(echo), tokenizer, pool)
    assert [s.reward for s in result.groups[0].samples] == [1.0, 0.0, 0.0, 0.0]
    assert result.metrics["eval/large"] == 0.25


def test_siblings_of_a_trajectory_count_once(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    config = make_config(tmp_path, n_samples_per_eval_prompt=2)
    config = replace(config, rollout=replace(config.rollout, custom_generate_function_path=f"{__name__}.one_or_two"))
    metrics = run(config, FakeEngines(echo), tokenizer, pool).metrics
    assert metrics["eval/small"] == pytest.approx((1.0 + 0.5) / 2), "two siblings of reward 1 and 0 are one 0.5"
    assert metrics["eval/small-num_samples"] == 4 * 3


async def one_or_two(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> list[Sample]:
    rewards = [1.0] if sample.sample_id % 2 else [1.0, 0.0]
    siblings = [replace_sample(sample, reward) for reward in rewards]
    return siblings


def replace_sample(sample: Sample, reward: float) -> Sample:
    sibling = Sample(tokens=sample.tokens, metadata=dict(sample.metadata), status=SampleStatus.COMPLETED, reward=reward)
    sibling.append_response([3], [-1.0], version=0)
    return sibling


def test_the_standard_error_is_over_prompts() -> None:
    def group(number: int, *rewards: float) -> Group:
        return Group(number, [Sample(group_id=number, trajectory_id=i, reward=r) for i, r in enumerate(rewards)])

    # means 1, 0.5, 0: sample standard deviation 0.5, over sqrt(3)
    metrics = set_metrics("s", [group(0, 1, 1), group(1, 1, 0), group(2, 0, 0)], None)
    assert metrics["eval/s"] == 0.5
    assert metrics["eval/s-stderr"] == pytest.approx(0.5 / 3**0.5)
    assert "eval/s-stderr" not in set_metrics("s", [group(0, 1, 1)], None)
