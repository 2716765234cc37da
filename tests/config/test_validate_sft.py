"""Settings of supervised training that nobody would read."""

from __future__ import annotations

from dataclasses import replace
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


def test_supervised_tokens_and_a_loss_of_ones_own_have_nothing_to_correct() -> None:
    names = ("use_tis", "tis_clip", "custom_tis_function_path", "use_rs", "rejected_tokens", "use_rollout_logprobs")
    explicit = {f"algo.{name}" for name in names}
    for loss_type in ("sft_loss", "custom_loss"):
        algo = AlgoConfig(loss_type=loss_type, use_tis=True, use_rs=True, custom_tis_function_path="m.f")
        found = list(unread_settings(replace(config(), algo=algo), explicit))
        named = {p.split()[0] for p in found if f"--loss-type {loss_type}" in p}
        assert named == {"--" + name.replace("_", "-") for name in names}


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
