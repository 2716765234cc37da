"""What the loop must know of the engines' weights, before anything starts."""

from dataclasses import replace
from typing import Any

import pytest

from vime.config import ClusterConfig, Config, EvalConfig, RolloutConfig, SyncConfig
from vime.config.unread import unread_settings
from vime.config.validate_loop import check_loop


def config(interval: int = 2, every: int | None = None, **more: Any) -> Config:
    made = Config(
        rollout=RolloutConfig(num_rollout=8),
        sync=SyncConfig(update_weights_interval=interval),
        eval=EvalConfig(eval_interval=every, eval_prompt_data=["heldout", "heldout.jsonl"]),
    )
    return replace(made, **more)


@pytest.mark.parametrize(
    "right", [config(), config(every=4), config(1, every=3), config(2, every=3, eval=EvalConfig())]
)
def test_engines_may_keep_their_weights_where_none_else_are_asked_for(right: Config) -> None:
    assert list(check_loop(right)) == []


def test_evaluation_is_of_the_weights_just_trained() -> None:
    (problem,) = check_loop(config(every=3))
    assert problem.startswith("--eval-interval is 3, but engines get weights every 2 rollouts")
    assert problem.endswith("use a multiple of 2")


def test_what_generates_while_it_trains_cannot_take_turns_on_the_devices() -> None:
    colocated = config(1, cluster=ClusterConfig(colocate=True))
    assert list(check_loop(colocated)) == []
    (problem,) = check_loop(colocated, overlapped=True)
    assert problem.startswith("--colocate: train_async.py generates while it trains") and "use train.py" in problem
    assert list(check_loop(config(), overlapped=True)) == []


def test_an_interval_without_training_is_read_by_nobody() -> None:
    evaluation = config(rollout=RolloutConfig(num_rollout=0))
    assert list(check_loop(evaluation)) == []
    (problem,) = unread_settings(evaluation, {"sync.update_weights_interval"})
    assert "--update-weights-interval is 2, but nothing reads it" in problem
