"""What --fully-async refuses."""

from dataclasses import replace
from typing import Any

import pytest

from vime.config import (
    AlgoConfig,
    Config,
    DebugConfig,
    RolloutConfig,
    StreamConfig,
    SyncConfig,
)
from vime.config.unread import unread_settings
from vime.config.validate_stream import check_stream


def config(rollout: dict[str, Any] | None = None, **sections: Any) -> Config:
    stream = replace(StreamConfig(fully_async=True), **sections.pop("stream", {}))
    return Config(
        rollout=RolloutConfig(rollout_batch_size=4, num_rollout=9, **(rollout or {})), stream=stream, **sections
    )


def test_what_works_with_it_passes() -> None:
    assert list(check_stream(config(), overlapped=True)) == []
    hooks = {
        "custom_generate_function_path": "a.b",
        "dynamic_sampling_filter_path": "a.b",
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": True,
    }
    assert list(check_stream(config(hooks), overlapped=True)) == []
    weighted = AlgoConfig(use_tis=True)
    assert list(check_stream(config(algo=weighted, stream={"stale_groups": "correct"}), overlapped=True)) == []
    between = {"custom_generate_function_path": "a.b", "custom_generate_timeout_s": 600.0}
    assert list(check_stream(config(between, stream={"update_weights_in_flight": False}), overlapped=True)) == []
    assert list(check_stream(config(stream={"update_weights_in_flight": False}), overlapped=True)) == []
    explicit = {"rollout.partial_rollout", "rollout.mask_offpolicy_in_partial_rollout", "stream.max_staleness"}
    assert list(unread_settings(config(hooks), explicit)) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"rollout": {"rollout_function_path": "mine.rollout"}},
            "--rollout-function-path mine.rollout gives a rollout",
        ),
        ({"rollout": {"over_sampling_batch_size": 8}}, "use --max-groups-in-flight"),
        ({"sync": SyncConfig(update_weights_interval=4)}, "--max-staleness is 2, but with --update-weights-interval 4"),
        ({"stream": {"max_groups_in_flight": 13}}, "allow 12"),
        ({"stream": {"stale_groups": "correct"}}, "add --use-tis"),
        (
            {
                "rollout": {"custom_generate_function_path": "mine.episode"},
                "stream": {"update_weights_in_flight": False},
            },
            "mine.episode that never returns",
        ),
        ({"debug": DebugConfig(load_debug_rollout_data="runs/a")}, "--load-debug-rollout-data generates nothing"),
        ({"debug": DebugConfig(debug_rollout_only=True)}, "a trainer beside engines"),
        ({"algo": AlgoConfig(loss_type="sft_loss")}, "a trainer beside engines"),
    ],
)
def test_what_does_not_is_refused_with_what_to_do(settings: dict[str, Any], said: str) -> None:
    (problem,) = check_stream(config(**settings), overlapped=True)
    assert said in problem


def test_it_is_for_the_program_that_generates_while_it_trains() -> None:
    (problem,) = check_stream(config(), overlapped=False)
    assert "start train_async.py" in problem
    assert list(check_stream(config({}, stream={"fully_async": False}), overlapped=False)) == []


def test_its_settings_are_read_with_it_alone() -> None:
    keys = {"stream.max_staleness", "stream.stale_groups", "rollout.partial_rollout"}
    said = list(unread_settings(config(stream={"fully_async": False}, rollout={"partial_rollout": True}), keys))
    assert len(said) == 3 and sum("add --fully-async" in problem for problem in said) == 2


def test_a_number_below_its_range_is_left_to_the_ranges() -> None:
    assert list(check_stream(config(stream={"max_staleness": -1}), overlapped=True)) == []
