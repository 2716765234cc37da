"""Held-out sets: what the flags and the YAML file amount to, and every mistake in them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.config import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from vime.config.eval_sets import check_settings, eval_sets
from vime.errors import ConfigError


def config(folder: Path, text: str = "", **settings: Any) -> Config:
    if text:
        (folder / "sets.yaml").write_text(text)
        settings["eval_config"] = str(folder / "sets.yaml")
    return Config(
        data=DataConfig(input_key="question", label_key="answer", tool_key="functions"),
        rollout=RolloutConfig(rollout_max_response_len=64, rollout_stop=["\n"], rollout_max_context_len=128),
        reward=RewardConfig(reward_key="score"),
        eval=EvalConfig(**settings),
    )


def test_a_set_without_settings_takes_the_flags_and_they_the_rollouts(tmp_path: Path) -> None:
    (plain,) = eval_sets(config(tmp_path, eval_prompt_data=["a", "a.jsonl"]))
    assert (plain.name, plain.path) == ("a", "a.jsonl")
    assert (plain.input_key, plain.label_key, plain.tool_key) == ("question", "answer", "functions")
    assert (plain.max_response_len, plain.max_context_len, plain.max_prompt_len) == (64, 128, None)
    assert (plain.temperature, plain.stop, plain.reward_key) == (1.0, ("\n",), "score")
    flags = {
        "eval_input_key": "q",
        "eval_label_key": "a",
        "eval_tool_key": "t",
        "n_samples_per_eval_prompt": 4,
        "eval_temperature": 0.5,
        "eval_top_p": 0.9,
        "eval_top_k": 20,
        "eval_min_new_tokens": 2,
        "eval_max_response_len": 32,
        "eval_max_prompt_len": 10,
        "eval_max_context_len": 100,
        "eval_reward_key": "r",
    }
    (own,) = eval_sets(config(tmp_path, eval_prompt_data=["a", "a.jsonl"], **flags))
    for flag, value in flags.items():
        name = flag.removeprefix("eval_")
        assert getattr(own, name) == value, name


def test_a_sets_own_value_wins_over_the_files_default_and_that_over_the_flag(tmp_path: Path) -> None:
    text = """
eval:
  defaults: {temperature: 0.5, top_k: 5, label_key: null}
  datasets:
    - {name: b, path: b.jsonl, top_k: 7, temperature: 0}
    - {name: c, path: c.jsonl}
"""
    settings = config(tmp_path, text, eval_prompt_data=["a", "a.jsonl"], eval_temperature=0.1, eval_top_p=0.9)
    a, b, c = eval_sets(settings)
    assert [(s.name, s.temperature, s.top_k, s.top_p) for s in (a, b, c)] == [
        ("a", 0.1, -1, 0.9),
        ("b", 0.0, 7, 0.9),
        ("c", 0.5, 5, 0.9),
    ]
    assert (a.label_key, b.label_key) == ("answer", None)


def test_sets_may_be_a_mapping_by_name(tmp_path: Path) -> None:
    (one,) = eval_sets(config(tmp_path, "eval: {datasets: {aime: {path: a.jsonl}}}"))
    assert (one.name, one.path) == ("aime", "a.jsonl")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("eval: [", "is not YAML"),
        ("[1]", "must hold `eval:`, not a list"),
        ("prompt-data: a\nlr: 1", "has no `eval`, under which the sets stand"),
        ("evla: {}", "evla is not a setting; did you mean eval?"),
        ("eval: {datasets: []}", "names no sets"),
        ("eval: {defaluts: {}, datasets: [{name: a, path: b}]}", "defaluts is not a setting; did you mean defaults?"),
        (
            "eval: {datasets: [{name: a, path: b, temperatures: 1}]}",
            "set a: temperatures is not a setting; did you mean t",
        ),
        ("eval: {defaults: {name: x}, datasets: [{name: a, path: b}]}", "defaults: name is not a setting"),
        ("eval: {datasets: [{path: b}]}", "set 1 has no name"),
        ("eval: {datasets: [{name: a}]}", "set a has no path"),
        ("eval: {datasets: [a.jsonl]}", "set 1 must be `name: value` lines, not a str"),
        ("eval: {datasets: [{name: a, path: b}, {name: a, path: c}]}", "two held-out sets are called a"),
        ("eval: {datasets: [{name: a/b, path: b}]}", "set a/b: the name 'a/b' of a held-out set is empty or holds"),
        ("eval: {datasets: [{name: 7, path: b}]}", "set 7: name is 7, but needs text"),
        ("eval: {datasets: [{name: a, path: b, temperature: hot}]}", "temperature is 'hot', but needs a finite number"),
        ("eval: {datasets: [{name: a, path: b, temperature: .nan}]}", "temperature is nan, but needs a finite number"),
        ("eval: {datasets: [{name: a, path: b, top_k: 1.5}]}", "top_k is 1.5, but needs a whole number"),
        ("eval: {datasets: [{name: a, path: b, top_k: 0}]}", "top_k is 0, but must be -1 (off) or at least 1"),
        ("eval: {datasets: [{name: a, path: b, top_p: 2}]}", "top_p is 2, but must be above 0 and at most 1"),
        ("eval: {datasets: [{name: a, path: b, max_response_len: true}]}", "True, but needs a whole number"),
        ("eval: {datasets: [{name: a, path: b, stop: x}]}", "stop is 'x', but needs a list of text"),
        ("eval: {datasets: [{name: a, path: b, n_samples_per_eval_prompt: 0}]}", "is 0, but must be at least 1"),
        ("eval: {datasets: [{name: a, path: b, path: c}]}", "sets path twice, in lines 1 and 1"),
    ],
)
def test_one_mistake_in_the_file_gives_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        eval_sets(config(tmp_path, text))
    (found,) = caught.value.problems
    assert problem in found and found.startswith((f"--eval-config {tmp_path}", "two held-out")), found


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        eval_sets(config(tmp_path, "eval: {datasets: [{name: a, top_k: 0, x: 1}]}", eval_prompt_data=["one"]))
    assert len(caught.value.problems) == 4, caught.value.problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"temperature": 0.0, "n_samples_per_eval_prompt": 2}, "n_samples_per_eval_prompt is 2, but temperature 0 is"),
        ({"temperature": 0.001}, "temperature is 0.001, but vLLM samples at 0.01 at least; use that or more, or 0"),
        ({"min_new_tokens": 65}, "min_new_tokens is 65, above max_response_len 64"),
        ({"rm_type": "maht"}, "rm_type is 'maht', which is no built-in reward; did you mean math?"),
        ({"rm_type": "math", "label_key": None}, "rm_type math compares with a label"),
        ({"max_response_len": 128}, "max_response_len is 128, which leaves no room for a prompt in 128 tokens"),
        ({"max_context_len": 512}, "max_context_len is 512, but the model has 256 positions"),
        ({"max_prompt_len": 128}, "max_prompt_len is 128, which leaves no room for a response in 128 tokens"),
        ({"stop_token_ids": (1, 320)}, "stop token 320 is no token: the checkpoint's vocabulary has 320"),
    ],
)
def test_contradictions_are_named_with_their_set(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    (right,) = eval_sets(config(tmp_path, eval_prompt_data=["aime", "a.jsonl"]))
    facts: dict[str, Any] = {"reward_names": ("math", "gsm8k", "random"), "max_positions": 256, "vocab_size": 320}
    facts |= {"without_label": ("random",)}
    assert list(check_settings([right, replace(right, rm_type="random", label_key=None)], **facts)) == []
    (found,) = check_settings([replace(right, **change)], **facts)
    assert found.startswith("held-out set aime: ") and problem in found
