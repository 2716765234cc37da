"""The handle of policy and critic: who is asked what, at the same time, and when a checkpoint of both is whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.trainer.conftest import make_batch_of
from vime.config import TrainConfig
from vime.config.parallel import ParallelSizes
from vime.errors import TrainingError
from vime.loop.batch_plan import BatchPlanner
from vime.orchestration import critic_group, rank_group
from vime.orchestration.critic_group import TrainerWithCritic
from vime.orchestration.rank_group import RankGroup


class Calls:
    """Takes the place of Ray: a call is answered by its method's entry for its group."""

    def __init__(self, answers: dict[tuple[str, str], list[Any]]) -> None:
        self.answers, self.waits = answers, list[list[tuple[str, str]]]()

    def ask(self, group: str, method: str) -> list[Any]:
        return [(group, method, rank) for rank in range(2)]

    def wait_all(self, calls: dict[Any, str]) -> list[Any]:
        self.waits.append(sorted({(group, method) for group, method, _ in calls}))
        found = [self.answers[group, method].pop(0) for group, method in dict.fromkeys((g, m) for g, m, _ in calls)]
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in found for _ in range(2)]


def trainer_of(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> TrainerWithCritic:
    monkeypatch.setattr(ray, "put", lambda value: value)
    for module in (critic_group, rank_group):
        monkeypatch.setattr(module, "wait_all", calls.wait_all)
    groups: list[Any] = []
    for name, kind in (("policy", TrainerWithCritic), ("critic", RankGroup)):
        group: Any = kind.__new__(kind)
        group.lock, group._is_usable, group._name = threading.RLock(), True, name
        monkeypatch.setattr(group, "ask", lambda method, *args, name=name: calls.ask(name, method), raising=False)
        groups.append(group)
    trainer, critic = groups
    trainer._critic, trainer._saving, trainer.last_trained = critic, [], None
    trainer._planner = BatchPlanner(
        train=TrainConfig(), dp_size=2, sizes=ParallelSizes(), model=None, global_batch_size=4
    )
    return trainer  # type: ignore[no-any-return]


def test_both_work_at_the_same_time_and_are_told_of_each_others_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(
        {
            ("policy", "begin_train"): [None],
            ("critic", "begin_values"): ["values"],
            ("policy", "critic_targets"): ["targets"],
            ("policy", "end_train"): [{"train/loss": 1.0}],
            ("critic", "train"): [{"train/critic-value_loss": 2.0}],
        }
    )
    trainer = trainer_of(monkeypatch, calls)
    metrics = trainer.train(make_batch_of([5, 6, 7, 8]))
    assert metrics == {"train/loss": 1.0, "train/critic-value_loss": 2.0} and trainer.last_trained == 7
    assert calls.waits == [
        [("critic", "begin_values"), ("policy", "begin_train")],
        [("policy", "critic_targets")],
        [("critic", "train"), ("policy", "end_train")],
    ]


def test_a_checkpoint_is_whole_when_both_parts_are_and_none_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(
        {
            ("policy", "begin_save"): [None],
            ("critic", "begin_save"): [None],
            ("policy", "end_save"): [True],
            ("critic", "end_save"): [False, True],
        }
    )
    trainer = trainer_of(monkeypatch, calls)
    trainer.begin_save(Path("x/trainer"))
    assert [trainer.end_save(wait=False), trainer.end_save(wait=True)] == [False, True]


def test_when_one_fails_neither_is_asked_to_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls({("policy", "load"): [None], ("critic", "load"): [TrainingError("critic rank 1: its process died")]})
    trainer = trainer_of(monkeypatch, calls)
    with pytest.raises(TrainingError, match="critic rank 1"):
        trainer.load(Path("x/trainer"))
    assert not trainer._is_usable and not trainer._critic._is_usable
