"""Runs that only evaluate: what they need, and what they do not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_validate import changed, problems
from vime.config import CheckpointConfig, Config, EvalConfig, RewardConfig, RolloutConfig
from vime.config.modes import generates, trains

SFT = "vime.rollout.sft_rollout.generate_rollout"


@pytest.fixture
def right(tmp_path: Path) -> Config:
    path = tmp_path / "heldout.jsonl"
    path.write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    return Config(
        checkpoint=CheckpointConfig(hf_checkpoint="model"),
        rollout=RolloutConfig(num_rollout=0),
        reward=RewardConfig(rm_type="exact_match"),
        eval=EvalConfig(
            eval_prompt_data=["heldout", str(path)],
            eval_label_key="label",
            eval_max_response_len=8,
            eval_max_context_len=32,
        ),
    )


def test_an_evaluation_needs_no_setting_of_training_and_starts_no_trainer(right: Config) -> None:
    assert problems(right) == []
    assert generates(right) and not trains(right)
    assert trains(replace(right, rollout=RolloutConfig(num_rollout=1)))


def test_a_training_checkpoint_is_read_by_a_trainer_with_all_its_settings(right: Config, tmp_path: Path) -> None:
    loading = changed(right, checkpoint__load=str(tmp_path))
    assert trains(loading) and generates(loading)
    assert any("--lr is required" in problem for problem in problems(loading))


def test_a_model_of_supervised_training_is_evaluated_too(right: Config) -> None:
    config = changed(right, algo__loss_type="sft_loss", rollout__rollout_function_path=SFT)
    (found,) = problems(config, explicit=frozenset({"eval.eval_prompt_data"}))
    assert found.startswith(f"{SFT} samples nothing, so that it cannot evaluate; add --eval-function-path")
    sampling = "vime.rollout.vllm_rollout.generate_rollout"
    config = changed(config, rollout__eval_function_path=sampling)
    assert problems(config, explicit=frozenset({"eval.eval_prompt_data"})) == []
    assert generates(config)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"eval__eval_prompt_data": []},
            "there is nothing to evaluate: give held-out sets",
        ),
        ({"eval__skip_eval_before_train": True}, "--skip-eval-before-train leaves out the evaluation"),
        ({"reward__rm_type": None}, "a reward is required for heldout"),
        ({"debug__load_debug_rollout_data": "x"}, "--num-rollout is 0, so that nothing is replayed"),
        ({"eval__eval_max_response_len": 32}, "held-out set heldout: max_response_len is 32, which leaves no room"),
    ],
)
def test_one_wrong_setting_gives_one_sentence(right: Config, change: dict[str, Any], problem: str) -> None:
    (found,) = problems(changed(right, **change))
    assert problem in found
