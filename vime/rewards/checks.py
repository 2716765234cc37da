"""What counts as a reward: a finite number, or a dict of them from which one is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeAlias

from vime.config.ranges import MAX_REWARD
from vime.errors import RewardError, SampleRewardError

Reward: TypeAlias = float | dict[str, float]


def check_reward(value: Any, reward_key: str | None) -> Reward:
    """The reward as float or dict of floats.

    Raises: SampleRewardError unless it is made of finite numbers, the key among them.
    """
    if isinstance(value, Mapping):
        if not value:
            raise SampleRewardError("the reward is an empty dict")
        checked = {str(key): check_number(entry, f"reward[{key!r}]") for key, entry in value.items()}
        if reward_key is not None and reward_key not in checked:
            raise SampleRewardError(f"the reward has no {reward_key!r} (--reward-key); it has {sorted(checked)}")
        return checked
    return check_number(value, "the reward")


def check_number(value: Any, what: str) -> float:
    """A finite number as float; numpy's and torch's scalars are taken, text is not.

    Larger ones than MAX_REWARD are refused: advantages are float32, and the std of 1e200 is infinite, which would make
    them 0.
    Raises: SampleRewardError.
    """
    if not isinstance(value, Real) and not hasattr(value, "item"):
        raise SampleRewardError(f"{what} is {repr(value)[:200]}; a finite number is expected")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SampleRewardError(f"{what} is {str(value)[:200]!r}; a finite number is expected") from error
    if not math.isfinite(number):
        raise SampleRewardError(f"{what} is {number}; a finite number is expected")
    if abs(number) > MAX_REWARD:
        raise SampleRewardError(
            f"{what} is {number}; numbers up to {MAX_REWARD:g} are taken, as training is in float32"
        )
    return number


def scalar_reward(reward: Reward | None, reward_key: str | None) -> float:
    """The number that is trained on. Raises: RewardError if there is none or a dict leaves open which."""
    if reward is None:
        raise RewardError("the sample has no reward")
    if not isinstance(reward, dict):
        return reward
    if reward_key is None:
        raise RewardError(f"the reward has {sorted(reward)}; choose one by --reward-key")
    if reward_key not in reward:
        raise RewardError(f"the reward has no {reward_key!r} (--reward-key); it has {sorted(reward)}")
    return reward[reward_key]
