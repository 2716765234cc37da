"""examples/custom_task: its pieces together on engines without a model, and its recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.custom_task.make_data import write_data
from examples.custom_task.task import generate, look_up, reward
from tests.fakes import FakeEngines, char_tokenizer
from vime.cli.resolve import resolve
from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.protocols import GenerateRequest, RolloutContext, SamplingParams
from vime.rewards.pool import GraderPool
from vime.rewards.score import make_reward_function
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import Sample, SampleStatus

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "custom_task" / "recipe.yaml"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return char_tokenizer()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    write_data(folder, num_train=20, num_heldout=5)
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def knows_the_task(tokenizer: Any, asks: str | None = None) -> FakeEngines:
    """Engines that do what training is to lead to: ask for the thing of the prompt, then say the price."""

    def answer(request: GenerateRequest, index: int) -> tuple[list[int], str]:
        text = tokenizer.decode(list(request.token_ids))
        said = text.split("costs ")[1][0] if "costs" in text else asks or text.removesuffix(":")[-1]
        return tokenizer(said, add_special_tokens=False)["input_ids"], "length"

    return FakeEngines(answer)


def run(tokenizer: Any, engines: FakeEngines, lines: list[dict[str, Any]], **rollout: Any) -> list[Sample]:
    reward_settings = RewardConfig(custom_rm_path="examples.custom_task.task.reward", reward_key="score")
    config = Config(
        data=DataConfig(rollout_seed=1),
        rollout=RolloutConfig(
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            rollout_max_response_len=1,
            custom_generate_function_path="examples.custom_task.task.generate",
            **rollout,
        ),
        reward=reward_settings,
    )
    prompts = [
        Prompt(x["question"], tuple(tokenizer(x["question"])["input_ids"]), label=x["answer"], metadata=x["metadata"])
        for x in lines
    ]
    pool = GraderPool()
    context = RolloutContext(config, engines, tokenizer, make_reward_function(reward_settings, pool))
    source = DataBuffer(prompts, n_samples_per_prompt=2, shuffle=False, seed=0)
    groups = generate_rollout(context, 0, source, engines).groups
    pool.close()
    return [sample for group in groups for sample in group.samples]


def test_two_turns_with_the_tools_words_between_them(tokenizer: Any, tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    for sample, line in zip(run(tokenizer, knows_the_task(tokenizer), lines)[::2], lines, strict=False):
        thing, price = line["metadata"]["thing"], line["answer"]
        assert sample.response == f"{thing} costs {price}; so {price}"
        assert sample.loss_mask == (1, *[0] * len(look_up(thing, line["metadata"]["prices"])), 1)
        assert sample.reward == {"score": 1.0, "asks_right": 1.0, "is_right": 1.0}


def test_a_wrong_question_earns_little_and_none_at_all_nothing(tokenizer: Any, tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    for line in lines:
        line["metadata"]["thing"] = "0"
        line["answer"] = line["metadata"]["prices"]["0"]
    (wrong, *_) = run(tokenizer, knows_the_task(tokenizer, asks="3"), lines)
    assert wrong.reward == {"score": 0.2, "asks_right": 0.0, "is_right": 0.0}
    (none, *_) = run(tokenizer, knows_the_task(tokenizer, asks="x"), lines)
    assert none.response.startswith("x is unknown; so ") and none.reward["score"] == 0.0  # type: ignore[index]


async def _one(tokenizer: Any, finish_reason: str) -> Sample:
    engines = FakeEngines(lambda request, i: ([5], finish_reason))
    context = RolloutContext(Config(), engines, tokenizer, reward=reward)
    sample = Sample(tokens=(1, 2), metadata={"prices": {}})
    return await generate(context, sample, replace(SamplingParams(), max_tokens=1))


def test_an_abort_is_passed_on() -> None:
    import asyncio

    sample = asyncio.run(_one(char_tokenizer(), "abort"))
    assert sample.status is SampleStatus.ABORTED and "asked" not in sample.metadata


def test_the_recipe_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.cli.init_model import TinyModel, init_model

    monkeypatch.chdir(tmp_path)
    init_model(tmp_path / "runs/custom_task/model", TinyModel(num_layers=1))
    write_data(tmp_path / "runs/custom_task/data")
    resolved = resolve(["--config", str(RECIPE)])
    assert resolved.config.reward.reward_key == "score"
