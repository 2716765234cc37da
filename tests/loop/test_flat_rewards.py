"""Rollouts that teach nothing are noticed."""

from vime.loop.flat_rewards import FlatRewards

FLAT = {
    "rollout/zero_std": 1.0,
    "rollout/advantages/min": 0.0,
    "rollout/advantages/max": 0.0,
    "rollout/raw_reward": 0.0,
}


def test_it_warns_at_the_first_and_then_ever_less_often_until_something_is_learned() -> None:
    flat = FlatRewards()
    warned = [r for r in range(9) if flat.note(r, FLAT) is not None]
    assert warned == [0, 1, 3, 7], "the 1st, 2nd, 4th and 8th in a row"
    assert flat.note(9, {**FLAT, "rollout/zero_std": 0.9}) is None
    words = flat.note(10, FLAT)
    assert words is not None and words.startswith("warning: rollout 10: the rewards of every group are equal (mean 0)")


def test_equal_rewards_that_are_advantages_themselves_do_teach() -> None:
    raw = {**FLAT, "rollout/advantages/min": 1.0, "rollout/advantages/max": 1.0}  # --disable-rewards-normalization
    assert FlatRewards().note(0, raw) is None
    assert FlatRewards().note(0, {"train/loss": 0.5}) is None, "supervised training has no rewards"
