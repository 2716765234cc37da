"""Where a run begins, and what it may go on from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from vime.config import AlgoConfig, CheckpointConfig, Config, DebugConfig, RolloutConfig, TrainConfig
from vime.errors import ConfigError
from vime.loop.checkpoint_writing import write_weights_file
from vime.loop.compatibility import settings_to_keep, weights_to_keep
from vime.orchestration.resume import check_settings, checkpoint_to_load, first_rollout, load, replayed_rollouts

HF = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
CONFIG = Config(megatron={"lr": 1e-3}, train=TrainConfig(global_batch_size=8))


def kept(config: Config, dtype: str = "float32", **hf: Any) -> dict[str, Any]:
    return settings_to_keep(config, {**HF, **hf}, dtype=dtype)


def write(folder: Path, *rollout_ids: int, settings: dict[str, Any] | None = None) -> None:
    for rollout_id in rollout_ids:
        path = folder / f"rollout_{rollout_id:06d}"
        path.mkdir(parents=True)
        state = {"format": 2, "rollout_id": rollout_id, "data_source": {}, "stop": {"metric": None, "values": []}}
        (path / "state.json").write_text(json.dumps({**state, "settings": settings or kept(CONFIG)}))


def checkpoints(**settings: Any) -> Config:
    return replace(CONFIG, checkpoint=CheckpointConfig(**settings))


def test_an_empty_folder_begins_a_run_only_where_the_run_saves(tmp_path: Path) -> None:
    load = str(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint there"):
        checkpoint_to_load(checkpoints(load=load, save=f"{load}/other"))
    same = checkpoints(load=load, save=load)
    assert checkpoint_to_load(same) is None and first_rollout(same, None) == 0
    write(tmp_path, 4, 7)
    found = checkpoint_to_load(same)
    assert found is not None and first_rollout(same, found) == 8


def test_a_damaged_newest_one_is_passed_over_and_renamed_when_the_run_goes_on(tmp_path: Path) -> None:
    write(tmp_path, 4, 7)
    (tmp_path / "rollout_000007" / "state.json").write_text("")
    config = checkpoints(load=str(tmp_path), save=str(tmp_path))
    found = checkpoint_to_load(config)
    assert found is not None and first_rollout(config, found) == 5
    trainer = source = stop = MagicMock()
    said = load(config, found, trainer, source, stop, changed=[])
    assert "rollout_000007 is damaged" in said and "damaged_rollout_000007 now" in said and "next is rollout 5" in said
    assert trainer.load.call_args.args == (tmp_path / "rollout_000004" / "trainer",)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged_rollout_000007", "rollout_000004"]


def test_converted_weights_begin_a_run_but_are_none_to_resume(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    write_weights_file(tmp_path, weights_to_keep(HF, dtype="float32"))
    with pytest.raises(ConfigError, match=r"holds weights alone .*; add --finetune"):
        checkpoint_to_load(checkpoints(load=str(tmp_path)))
    config = checkpoints(load=str(tmp_path), finetune=True)
    found = checkpoint_to_load(config)
    assert found is not None and first_rollout(config, found) == 0
    assert check_settings(config, found, kept(config, dtype="bfloat16")) == []
    with pytest.raises(ConfigError, match="the model's num_layers was 2 and is 3"):
        check_settings(config, found, kept(config, num_hidden_layers=3))


def test_checkpoints_that_would_look_newer_are_not_written_beside(tmp_path: Path) -> None:
    write(tmp_path, 4, 7)
    folder = str(tmp_path)
    with pytest.raises(ConfigError, match=r"holds rollout_000007, but this run begins with rollout 0: go on .* --load"):
        first_rollout(checkpoints(save=folder), None)
    back = checkpoints(load=folder, save=folder, ckpt_step=4)
    with pytest.raises(ConfigError, match="holds rollout_000007, but this run begins with rollout 5"):
        first_rollout(back, checkpoint_to_load(back))
    elsewhere = checkpoints(load=folder, save=f"{folder}/new", ckpt_step=4)
    assert first_rollout(elsewhere, checkpoint_to_load(elsewhere)) == 5
    afresh = checkpoints(load=folder, finetune=True)
    assert first_rollout(afresh, checkpoint_to_load(afresh)) == 0


def test_a_run_without_a_trainer_cannot_use_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    config = replace(checkpoints(load=str(tmp_path)), debug=DebugConfig(debug_rollout_only=True))
    with pytest.raises(ConfigError, match="engines serve --hf-checkpoint"):
        checkpoint_to_load(config)


def check(tmp_path: Path, now: dict[str, Any], **settings: Any) -> list[str]:
    if not tmp_path.joinpath("rollout_000001").exists():
        write(tmp_path, 1)
    config = checkpoints(load=str(tmp_path), **settings)
    checkpoint = checkpoint_to_load(config)
    assert checkpoint is not None
    return check_settings(config, checkpoint, now)


def test_the_same_settings_go_on_without_a_word(tmp_path: Path) -> None:
    assert check(tmp_path, kept(CONFIG)) == []


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (kept(CONFIG, num_hidden_layers=3), "the model's num_layers was 2 and is 3"),
        (kept(CONFIG, vocab_size=99), "the model's vocab_size was 100 and is 99"),
        (kept(replace(CONFIG, megatron={"lr": 1e-3, "optimizer": "sgd"})), "--optimizer was adam and is sgd; use adam"),
        (kept(replace(CONFIG, algo=AlgoConfig(loss_type="sft_loss"))), "--loss-type was policy_loss and is sft_loss"),
        (
            kept(replace(CONFIG, megatron={"lr": 1e-3, "apply_wd_to_qk_layernorm": True})),
            "it was not saved with --apply-wd-to-qk-layernorm; leave it out",
        ),
        (kept(CONFIG, dtype="bfloat16"), "the weights' dtype was float32 and is bfloat16; add --no-bf16"),
    ],
)
def test_what_the_checkpoint_cannot_serve_is_refused_by_name(tmp_path: Path, now: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="rollout_000001: ") as caught:
        check(tmp_path, now)
    assert message in str(caught.value)


def test_settings_that_are_damaged_are_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    state = json.loads((tmp_path / "rollout_000001" / "state.json").read_text())
    del state["settings"]["fixed"]
    (tmp_path / "rollout_000001" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"its settings in state\.json are damaged: fixed missing"):
        check(tmp_path, kept(CONFIG))


def test_a_checkpoint_that_says_nothing_of_a_critic_has_none(tmp_path: Path) -> None:
    settings = kept(CONFIG)
    del settings["has_critic"]
    write(tmp_path, 1, settings=settings)
    assert check(tmp_path, kept(CONFIG)) == []
    ppo = kept(replace(CONFIG, algo=AlgoConfig(advantage_estimator="ppo")))
    with pytest.raises(ConfigError, match="it has no critic, which --advantage-estimator ppo trains"):
        check(tmp_path, ppo)
    assert check(tmp_path, ppo, finetune=True) == []


def test_weights_alone_go_with_another_optimizer_and_loss_but_not_another_model(tmp_path: Path) -> None:
    other = replace(CONFIG, megatron={"lr": 1.0, "optimizer": "sgd"}, algo=AlgoConfig(loss_type="sft_loss"))
    assert check(tmp_path, kept(other), finetune=True) == []
    with pytest.raises(ConfigError, match="hidden_size was 64 and is 128"):
        check(tmp_path, kept(other, hidden_size=128), finetune=True)


def test_a_checkpoint_without_optimizer_is_refused_unless_none_is_wanted(tmp_path: Path) -> None:
    write(tmp_path, 1, settings=kept(checkpoints(save="x", no_save_optim=True)))
    with pytest.raises(ConfigError, match="saved with --no-save-optim; add --no-load-optim"):
        check(tmp_path, kept(CONFIG))
    assert check(tmp_path, kept(CONFIG), no_load_optim=True) == []


def test_settings_that_may_change_are_said(tmp_path: Path) -> None:
    now = replace(CONFIG, megatron={"lr": 5e-4}, rollout=RolloutConfig(num_rollout=20))
    assert check(tmp_path, kept(now)) == ["--lr 0.001 -> 0.0005", "--num-rollout None -> 20"]


def test_the_files_of_a_replay_must_be_there(tmp_path: Path) -> None:
    config = replace(
        CONFIG,
        debug=DebugConfig(load_debug_rollout_data=str(tmp_path)),
        rollout=RolloutConfig(num_rollout=2),
    )
    with pytest.raises(ConfigError, match="2 of 2 files are not there"):
        replayed_rollouts(config, 0)
    assert replayed_rollouts(CONFIG, 0) is None


def test_a_checkpoint_that_does_not_speak_of_a_critic_has_none(tmp_path: Path) -> None:
    before = {name: value for name, value in kept(CONFIG).items() if name != "has_critic"}
    write(tmp_path, 0, settings=before)
    found = checkpoint_to_load(checkpoints(load=str(tmp_path)))
    assert found is not None and check_settings(CONFIG, found, kept(CONFIG)) == []
    with_critic = replace(CONFIG, algo=AlgoConfig(advantage_estimator="ppo"))
    with pytest.raises(ConfigError, match="it has no critic, which --advantage-estimator ppo trains"):
        check_settings(with_critic, found, kept(with_critic))
