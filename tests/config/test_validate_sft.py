"""Settings of supervised training that nobody would read."""

from __future__ import annotations

from typing import Any

import pytest

from vime.config import AlgoConfig, Config, DataConfig, DebugConfig, RolloutConfig
from vime.config.modes import SFT_ROLLOUT
from vime.config.unread import unread_settings


def config(*, rollout: str = SFT_ROLLOUT, chat: bool = True, debug: Any = None, **data: Any) -> Config:
    return Config(
        algo=AlgoConfig(loss_type="sft_loss"),
        data=DataConfig(prompt_data=["x.jsonl"], apply_chat_template=chat, **data),
        rollout=RolloutConfig(rollout_function_path=rollout),
        debug=debug or DebugConfig(),
    )


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({}, []),
        ({"chat": False}, ["sft-turns"]),
        ({"data_source_path": "m.Source"}, ["sft-overlong"]),
        ({"rollout": "my.rollout"}, ["sft-turns", "sft-overlong"]),
        ({"debug": DebugConfig(load_debug_rollout_data="x")}, ["sft-turns", "sft-overlong"]),
    ],
)
def test_turns_are_of_conversations_and_lengths_of_prompt_files(changes: dict[str, Any], unread: list[str]) -> None:
    problems = list(unread_settings(config(**changes), {"data.sft_turns", "data.sft_overlong"}))
    named = sorted(problem.split()[0].removeprefix("--") for problem in problems)
    assert named == sorted(unread)
