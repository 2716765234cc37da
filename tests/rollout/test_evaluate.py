"""Held-out evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngines, char_tokenizer
from vime.config import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from vime.errors import ConfigError, DataError, EngineError
from vime.observability.metrics import check_names
from vime.protocols import GenerateRequest, RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.score import make_reward_function
from vime.rollout.eval_data import load_eval_sets
from vime.rollout.evaluate import pass_at_k
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import RolloutResult


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return char_tokenizer()


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    pool = GraderPool()
    yield pool
    pool.close()


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


def test_greedy_evaluation_of_several_samples_is_refused(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    config = make_config(tmp_path, n_samples_per_eval_prompt=2, eval_temperature=0.0)
    with pytest.raises(ConfigError, match="greedy"):
        run(config, FakeEngines(echo), tokenizer, pool)


def test_failed_samples_count_as_zero_and_many_stop_the_run(tmp_path: Path, tokenizer: Any, pool: GraderPool) -> None:
    def failing(number: int) -> FakeEngines:
        async def before(request: GenerateRequest) -> None:
            if int(request.request_id.split("-")[-1]) < number:
                raise EngineError("no answer")

        return FakeEngines(echo, before)

    result = run(make_config(tmp_path), failing(1), tokenizer, pool)
    assert result.metrics["eval/small"] == 0.75
    assert result.metrics["eval/small-failed_ratio"] == 0.25
    with pytest.raises(EngineError, match="4 of 12 held-out prompts failed; the first: EngineError: no answer"):
        run(make_config(tmp_path), failing(4), tokenizer, pool)
    aborting = FakeEngines(lambda request, i: ([5], "abort" if request.request_id.endswith("-1") else "stop"))
    assert run(make_config(tmp_path), aborting, tokenizer, pool).metrics["eval/small-failed_ratio"] == 0.25


def test_set_names_and_pairs_are_checked(tmp_path: Path, tokenizer: Any) -> None:
    for words, problem in (
        (["only"], "pairs NAME PATH, and got 1 words"),
        (["a/b", "x"], "hold a slash"),
        (["a", "x", "a", "y"], "used twice"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_eval_sets(make_config(tmp_path, eval_prompt_data=words), tokenizer)
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        load_eval_sets(make_config(tmp_path, eval_prompt_data=["a", str(tmp_path / "missing.jsonl")]), tokenizer)
    assert load_eval_sets(make_config(tmp_path, eval_prompt_data=[]), tokenizer) == {}


def test_held_out_keys_may_differ(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"q": "1", "a": "2"}')
    config = make_config(tmp_path, eval_prompt_data=["s", str(path)], eval_input_key="q", eval_label_key="a")
    assert load_eval_sets(config, tokenizer)["s"][0].label == "2"
