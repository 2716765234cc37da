"""examples/one_tool: supervised training learns what generation makes, token by token; its recipes; a real run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.one_tool.make_data import write_data
from examples.one_tool.tool import generate, parse_call, reward
from tests.fakes import FakeEngines
from vime.cli.init_model import TinyModel, init_model, make_tokenizer
from vime.cli.resolve import resolve
from vime.config import Config, DataConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompts import check_prompts, tokenise_prompts
from vime.protocols import GenerateRequest, RolloutContext, SamplingParams
from vime.rollout import sft_rollout
from vime.types import Sample, SampleStatus

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [ROOT / "examples" / "one_tool" / name for name in ("sft.yaml", "grpo.yaml")]
SFT = "vime.rollout.sft_rollout.generate_rollout"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer("chars", 1024)


def learnt_samples(tokenizer: Any, folder: Path) -> list[Sample]:
    """What supervised training is given."""
    write_data(folder, num_train=5, num_heldout=1)
    data = DataConfig(prompt_data=[str(folder / "train.jsonl")], input_key="messages", apply_chat_template=True)
    config = Config(data=data, rollout=RolloutConfig(rollout_function_path=SFT, rollout_batch_size=5))
    source = DataBuffer(
        tokenise_prompts(config, check_prompts(config, None), tokenizer), n_samples_per_prompt=1, shuffle=False, seed=0
    )
    context = RolloutContext(config, None, tokenizer, reward=None)  # type: ignore[arg-type]
    groups = sft_rollout.generate_rollout(context, 0, source, None).groups
    assert all(len(group.samples) == 1 for group in groups), "the template writes earlier turns as they were"
    return [group.samples[0] for group in groups]


def generated(tokenizer: Any, says: list[list[int]], prompt: tuple[int, ...], **fields: Any) -> Sample:
    """What `generate` makes of a model that says these turns."""
    turns = iter(says)

    def answer(request: GenerateRequest, index: int) -> tuple[list[int], str]:
        ids = next(turns)
        return ids, "stop" if ids[-1] == tokenizer.eos_token_id else "length"

    context = RolloutContext(Config(), FakeEngines(answer), tokenizer, reward=reward)
    sample = Sample(tokens=prompt, **fields)
    return asyncio.run(generate(context, sample, SamplingParams(max_tokens=80)))


def own_turns(sample: Sample) -> list[list[int]]:
    """The runs of response tokens under mask 1."""
    turns: list[list[int]] = [[]]
    for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True):
        if mask:
            turns[-1].append(token)
        elif turns[-1]:
            turns.append([])
    return turns


def test_generation_makes_the_tokens_and_the_mask_that_supervised_training_learnt(
    tokenizer: Any, tmp_path: Path
) -> None:
    for sample in learnt_samples(tokenizer, tmp_path):
        line = {"label": sample.label[-1]["content"].removeprefix("It is ")[:-1], "metadata": dict(sample.metadata)}
        again = generated(tokenizer, own_turns(sample), sample.prompt_tokens, **line)
        assert (again.tokens, again.loss_mask) == (sample.tokens, sample.loss_mask)
        assert again.status is SampleStatus.COMPLETED
        scores = asyncio.run(reward(None, again))  # type: ignore[arg-type]
        assert scores == {"score": 1.0, "calls_right": 1.0, "is_right": 1.0}


def test_what_is_no_call_ends_the_episode(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def score(*says: str) -> tuple[SampleStatus, float]:
        sample = generated(tokenizer, [ids(text) for text in says], (5,), label="3", metadata={"a": 1, "b": 2})
        return sample.status, asyncio.run(reward(None, sample))["score"]  # type: ignore[arg-type]

    wrong = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call><|im_end|>'
    assert score("It is 3.<|im_end|>") == (SampleStatus.COMPLETED, 0.6)
    assert score('<tool_call>{"na') == (SampleStatus.TRUNCATED, 0.0)
    assert score(wrong, "It is 2.<|im_end|>") == (SampleStatus.COMPLETED, 0.1)
    assert score(wrong, wrong) == (SampleStatus.COMPLETED, 0.1), "one call, and no more"


@pytest.mark.parametrize(
    "call",
    [
        *("", "1+2", '{"name": "add"}', '{"name": "sub", "arguments": {"a": 1, "b": 2}}', "[" * 9999),
        *(f'{{"name": "add", "arguments": {x}}}' for x in ('{"a": 1}', '{"a": true, "b": 2}', '{"a": 9.5, "b": 2}')),
        '{"name": "add", "arguments": [1]}',
    ],
)
def test_broken_calls_are_no_calls(call: str) -> None:
    assert parse_call(f"<tool_call>{call}</tool_call>") is None
    assert parse_call('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>') == (1, 2)


def test_the_recipes_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "warm_model"):
        init_model(tmp_path / "runs/one_tool" / name, TinyModel(num_layers=1))
    write_data(tmp_path / "runs/one_tool/data")
    sft, grpo = (resolve(["--config", str(recipe)]).config for recipe in RECIPES)
    assert (sft.data.sft_turns, grpo.reward.reward_key) == ("all", "score")


@pytest.mark.ranks
@pytest.mark.slow
def test_conversations_are_learnt_by_a_real_run(tmp_path: Path) -> None:
    init_model(tmp_path / "model", TinyModel(num_layers=1))
    write_data(tmp_path / "data", num_train=8)
    flags = ("--prompt-data", str(tmp_path / "data" / "train.jsonl"), "--hf-checkpoint", str(tmp_path / "model"))
    folder = tmp_path / "sft"
    run(
        RECIPES[0],
        *flags,
        "--run-dir",
        str(folder),
        "--save-hf",
        str(tmp_path / "warm"),
        "--rollout-batch-size",
        "4",
        "--num-rollout",
        "2",
        "--lr-warmup-iters",
        "0",
    )
    first, second = (row for row in metrics_of(folder) if "train/loss" in row)
    assert second["train/loss"] < first["train/loss"]
    assert first["rollout/num_samples"] == 4
    assert first["rollout/num_learnt_tokens"] < first["rollout/num_tokens"]
    assert (tmp_path / "warm" / "model.safetensors").is_file()


@pytest.mark.engine
@pytest.mark.slow
def test_a_model_is_warmed_up_and_then_trained_through_the_tool(tmp_path: Path) -> None:
    """One conversation learnt by heart; the exported model then calls the tool in the engine, and GRPO goes on."""
    init_model(tmp_path / "model", TinyModel(num_layers=1))
    write_data(tmp_path / "data", num_train=1)
    model, train, heldout = tmp_path / "model", tmp_path / "data" / "train.jsonl", tmp_path / "data" / "heldout.jsonl"
    warm = ("--hf-checkpoint", str(model), "--save-hf", str(tmp_path / "warm"), "--run-dir", str(tmp_path / "sft"))
    until = ("--num-rollout", "200", "--rollout-batch-size", "1", "--lr", "3e-3", "--stop-below", "0.005")
    run(RECIPES[0], "--prompt-data", str(train), *warm, *until)
    flags = ("--prompt-data", str(train), "--eval-prompt-data", "heldout", str(heldout), "--skip-eval-before-train")
    sizes = ("--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "4", "--eval-interval", "9")
    folder = tmp_path / "grpo"
    run(RECIPES[1], *flags, *sizes, "--hf-checkpoint", str(tmp_path / "warm"), "--run-dir", str(folder))
    row = next(row for row in metrics_of(folder) if "train/loss" in row)
    assert row["rollout/reward/calls_right"] > 0, "the call that was learnt is made, and the tool answers it"
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-5


def run(recipe: Path, *flags: str) -> None:
    """train.py, which must end well."""
    done = subprocess.run(
        [sys.executable, "train.py", "--config", str(recipe), *flags],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
