from vime.loop.cadence import Cadence


def test_intervals_count_rollouts_and_the_last_is_always_due() -> None:
    cadence = Cadence(num_rollout=7, eval_interval=3, save_interval=2, evaluates=True, saves=True)
    assert [r for r in range(7) if cadence.eval_due(r)] == [2, 5, 6]
    assert [r for r in range(7) if cadence.save_due(r)] == [1, 3, 5, 6]


def test_without_an_interval_only_the_last_is_due() -> None:
    cadence = Cadence(num_rollout=3, evaluates=True, saves=True)
    assert [r for r in range(3) if cadence.eval_due(r)] == [2]


def test_nothing_is_due_when_nothing_is_evaluated_or_saved() -> None:
    cadence = Cadence(num_rollout=3, eval_interval=1, save_interval=1)
    assert not any(cadence.eval_due(r) or cadence.save_due(r) for r in range(3))
