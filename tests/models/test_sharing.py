"""Who leaves a shared device: the decision from bytes alone, in GiB here."""

from __future__ import annotations

from typing import Any

import pytest

from vime.errors import ConfigError
from vime.models.memory import GIB
from vime.models.sharing import Need, Sharing, Wishes, decide, settle

STAY, SLEEP, TURNS = (False, False), (True, False), (True, True)


def need(*, device: float = 100, step: float, static: float, engine: float = 10, cache: float = 30) -> Need:
    sizes = {"device": device, "step": step, "static": static, "away": 1, "late": static / 2}
    return Need(**{name: round(size * GIB) for name, size in (sizes | {"engine": engine, "cache": cache}).items()})


@pytest.mark.parametrize(
    ("sizes", "wishes", "way", "utilization"),
    [
        ({"step": 50, "static": 20}, {}, STAY, 0.41),  # what the engine wants, and one more; the rest is slack
        ({"step": 57, "static": 20}, {}, STAY, 0.4),
        ({"step": 58, "static": 20}, {}, SLEEP, 0.77),
        ({"step": 90, "static": 57}, {}, SLEEP, 0.4),
        ({"step": 90, "static": 58}, {}, TURNS, 0.9),
        ({"step": 20, "static": 10, "cache": 500}, {}, TURNS, 0.9),  # more requests than any cache holds
        ({"step": 10, "static": 5, "cache": 500}, {"offload_train": False}, SLEEP, 0.9),
        ({"step": 10, "static": 5, "cache": 500}, {"offload_rollout": False}, STAY, 0.87),
        ({"step": 50, "static": 20}, {"offload_train": True}, TURNS, 0.9),
        ({"step": 50, "static": 20}, {"offload_rollout": True}, SLEEP, 0.77),
        ({"step": 90, "static": 80}, {"offload_rollout": True}, TURNS, 0.9),
        ({"step": 90, "static": 79.5}, {"offload_train": False}, SLEEP, 0.17),  # a small cache: the user wants it so
        ({"step": 50, "static": 20}, {"utilization": 0.3}, STAY, 0.3),
        ({"step": 50, "static": 20}, {"utilization": 0.6}, SLEEP, 0.6),
        ({"step": 50, "static": 20}, {"utilization": 0.85}, TURNS, 0.85),
        ({"step": 50, "static": 20}, {"utilization": 0.97}, TURNS, 0.97),  # the user's word; vLLM says if it is wrong
    ],
)
def test_the_cheapest_way_that_leaves_the_engine_what_it_wants(
    sizes: dict[str, float], wishes: dict[str, Any], way: tuple[bool, bool], utilization: float
) -> None:
    sharing = decide(need(**sizes), Wishes(**wishes))
    assert (sharing.engines_sleep, sharing.trainer_leaves) == way
    assert sharing.utilization == pytest.approx(utilization)


@pytest.mark.parametrize(
    ("sizes", "wishes", "sentence"),
    [
        ({"step": 50, "static": 20}, {"utilization": 0.6, "offload_rollout": False}, "drop --no-offload-rollout"),
        ({"step": 95, "static": 80}, {"utilization": 0.6, "offload_train": False}, "drop --no-offload-train"),
        ({"step": 95, "static": 92}, {"offload_train": False}, "leave an engine 0.05 of the device, but it needs 0.10"),
        ({"step": 10, "static": 5, "engine": 99}, {}, "use more ranks or less memory a rank"),
        ({"step": 10, "static": 5}, {"offload_train": True, "offload_rollout": False}, "memory that nobody takes"),
    ],
)
def test_what_fits_in_no_way_that_is_allowed_is_refused(
    sizes: dict[str, float], wishes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        decide(need(**sizes), Wishes(**wishes))


@pytest.mark.parametrize(
    ("way", "used", "settled"),
    [
        (STAY, 60, STAY),  # 10 come with the first step, 30 more in it
        (STAY, 61, SLEEP),
        (STAY, 91, TURNS),  # of these 41 are the engine's
        (SLEEP, 49, SLEEP),
        (SLEEP, 50, TURNS),
        (TURNS, 90, TURNS),
    ],
)
def test_measured_memory_may_show_that_more_has_to_move(
    way: tuple[bool, bool], used: float, settled: tuple[bool, bool]
) -> None:
    sizes = need(step=50, static=20)
    sharing = settle(Sharing(*way, 0.41), sizes, Wishes(), used=round(used * GIB))
    assert (sharing.engines_sleep, sharing.trainer_leaves) == settled
    assert sharing.utilization == 0.41


def test_what_would_have_to_move_and_may_not_is_refused() -> None:
    sizes = need(step=50, static=20)
    with pytest.raises(ConfigError, match="lower --vllm-gpu-memory-utilization"):
        settle(Sharing(*STAY, 0.41), sizes, Wishes(offload_rollout=False), used=61 * GIB)
    with pytest.raises(ConfigError, match="drop --no-offload-train"):
        settle(Sharing(*SLEEP, 0.41), sizes, Wishes(offload_train=False), used=60 * GIB)


def test_the_decision_is_said_in_words() -> None:
    assert str(decide(need(step=50, static=20))) == "nothing moves; an engine takes 0.41 of a device"
    assert str(Sharing(*SLEEP, 0.5)).startswith("engines sleep while the trainer works, which keeps what it has")
    assert "leaves the device while they generate" in str(Sharing(*TURNS, 0.5))
