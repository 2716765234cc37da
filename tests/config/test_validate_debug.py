"""Debugging paths: modes that contradict each other, and paths that cannot work."""

from typing import Any

import pytest

from vime.config import AlgoConfig, Config, DebugConfig, RolloutConfig
from vime.config.modes import generates, rollout_data_to_save, train_data_to_save, trains
from vime.config.unread import unread_settings
from vime.config.validate_debug import check_debug


def config(num_rollout: int | None = 2, **debug: Any) -> Config:
    return Config(debug=DebugConfig(**debug), rollout=RolloutConfig(num_rollout=num_rollout))


@pytest.mark.parametrize(
    "right",
    [
        dict(),
        dict(debug_rollout_only=True, save_debug_rollout_data="out/{rollout_id:06d}.parquet"),
        dict(debug_train_only=True, load_debug_rollout_data="runs/a", load_debug_rollout_data_subsample=0.5),
        dict(load_debug_rollout_data="out/{rollout_id}.parquet", save_debug_train_data="t/{rollout_id}.npz"),
        dict(num_rollout=1, save_debug_rollout_data="out.parquet", save_debug_train_data="out.npz"),
        dict(dump_details="details"),
    ],
)
def test_what_works_is_let_through(right: dict[str, Any]) -> None:
    assert list(check_debug(config(**right))) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(debug_train_only=True), "--debug-train-only starts no engines, so it needs rollouts"),
        (dict(debug_rollout_only=True, load_debug_rollout_data="a"), "--load-debug-rollout-data no engines"),
        (dict(load_debug_rollout_data="a", load_debug_rollout_data_subsample=0.0), "subsample is 0.0, but must be"),
        (dict(load_debug_rollout_data="a", load_debug_rollout_data_subsample=1.5), "subsample is 1.5, but must be"),
        (dict(load_debug_rollout_data="a", num_rollout=None), "--num-epoch means nothing; give --num-rollout"),
        (dict(dump_details="d", save_debug_train_data="{rollout_id}"), "--dump-details sets --save-debug-train-data"),
        (dict(save_debug_rollout_data="{rollout_id}.pt"), "ends in .pt, but Parquet is written; name it *.parquet"),
        (dict(save_debug_rollout_data="a.parquet"), "names one file for all rollouts; put {rollout_id} into it"),
        (dict(save_debug_train_data="{rank}.npz"), "--save-debug-train-data {rank}.npz: only {rollout_id} is replaced"),
        (dict(save_debug_rollout_data=f"{__file__}/{{rollout_id}}"), "test_validate_debug.py is a file"),
    ],
)
def test_what_cannot_work_is_named(wrong: dict[str, Any], message: str) -> None:
    (problem,) = check_debug(config(**wrong))
    assert message in problem


def test_modes_say_which_stages_run() -> None:
    both = [
        config(),
        config(debug_rollout_only=True),
        config(load_debug_rollout_data="a"),
        Config(algo=AlgoConfig(loss_type="sft_loss")),
    ]
    assert [(trains(c), generates(c)) for c in both] == [(True, True), (False, True), (True, False), (True, False)]


def test_dump_details_is_both_dumps() -> None:
    short = config(dump_details="d")
    assert rollout_data_to_save(short) == "d/rollout_data/{rollout_id}.parquet"
    assert train_data_to_save(short) == "d/train_data/{rollout_id}.npz"
    assert rollout_data_to_save(config()) is train_data_to_save(config()) is None


def test_settings_that_a_mode_does_not_read_are_named() -> None:
    key = "debug.load_debug_rollout_data_subsample"
    assert "add --load-debug-rollout-data" in "".join(unread_settings(config(), {key}))
    one = config(debug_rollout_only=True, save_debug_train_data="t/{rollout_id}")
    assert "starts no trainer" in "".join(unread_settings(one, {"debug.save_debug_train_data"}))


@pytest.mark.parametrize(
    ("platform", "debug", "message"),
    [
        ("cpu", dict(profile=True), "add --use-pytorch-profiler"),
        ("cpu", dict(record_memory_history=True), "--record-memory-history is CUDA's"),
        (
            "cuda",
            dict(profile=True, profile_step_start=12),
            "--profile-step-start is 12, not below",
        ),
        (
            "cuda",
            dict(profile=True, profile_ranks=[0, 1]),
            "--profile-ranks holds 1, but training",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(platform: str, debug: dict[str, Any], message: str) -> None:
    (problem,) = check_debug(config(**debug), platform)
    assert message in problem


def test_what_can_be_profiled_is_let_through() -> None:
    assert list(check_debug(config(profile=True, use_pytorch_profiler=True), "cpu")) == []
    assert list(check_debug(config(profile=True, record_memory_history=True), "cuda")) == []
