import json

import pytest

from vime.errors import TrainingError
from vime.loop.cadence import Cadence, StopRule


def due(cadence: Cadence, what: str) -> list[int]:
    test = getattr(cadence, f"{what}_due")
    return [r for r in range(cadence.num_rollout) if test(r, last=cadence.is_last(r))]


def test_intervals_count_rollouts_and_the_last_is_always_due() -> None:
    cadence = Cadence(num_rollout=7, eval_interval=3, save_interval=2, evaluates=True, saves=True)
    assert due(cadence, "eval") == [2, 5, 6]
    assert due(cadence, "save") == [1, 3, 5, 6]
    assert due(Cadence(num_rollout=5, exports=True, export_interval=2), "export") == [1, 3, 4]


def test_without_an_interval_only_the_last_is_due() -> None:
    assert due(Cadence(num_rollout=3, evaluates=True), "eval") == [2]


def test_nothing_is_due_when_nothing_is_evaluated_or_saved() -> None:
    cadence = Cadence(num_rollout=3, eval_interval=1, save_interval=1)
    assert due(cadence, "eval") == due(cadence, "save") == due(cadence, "export") == []


def test_a_run_that_stops_early_evaluates_and_saves_its_last_rollout() -> None:
    cadence = Cadence(num_rollout=100, eval_interval=50, save_interval=50, evaluates=True, saves=True)
    assert cadence.eval_due(6, last=True)
    assert cadence.save_due(6, last=True)


def test_the_stop_rule_averages_over_its_window() -> None:
    rule = StopRule("train/loss", below=1.0, window=2)
    assert [rule.reached({"train/loss": loss}) for loss in (0.1, 2.0, 0.5, 1.5, 0.5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    rule = StopRule("rollout/raw_reward", above=0.9)
    assert [rule.reached({"rollout/raw_reward": r}) for r in (0.5, 0.9)] == [False, True]


def test_without_a_metric_nothing_stops_and_a_missing_one_is_named() -> None:
    assert not StopRule().reached({})
    with pytest.raises(TrainingError, match="--stop-metric train/lost is not among the metrics: train/loss"):
        StopRule("train/lost", below=1).reached({"train/loss": 1.0})


def test_the_stop_rules_window_goes_on_after_a_resume() -> None:
    values = [2.0, 1.4, 0.9, 0.8, 0.2]
    straight = StopRule("train/loss", below=0.9, window=3)
    want = [straight.reached({"train/loss": v}) for v in values]
    first, second = (StopRule("train/loss", below=0.9, window=3) for _ in range(2))
    got = [first.reached({"train/loss": v}) for v in values[:3]]
    second.restore(json.loads(json.dumps(first.state())))
    assert not second.is_met
    assert got + [second.reached({"train/loss": v}) for v in values[3:]] == want == [False, False, False, False, True]
    assert second.is_met


def test_values_of_another_metric_are_not_taken_over() -> None:
    rule = StopRule("train/loss", below=1.0, window=1)
    rule.reached({"train/loss": 5.0})
    other = StopRule("train/grad_norm", below=1.0, window=2)
    other.restore(rule.state())
    assert other.state() == {"metric": "train/grad_norm", "values": []}
