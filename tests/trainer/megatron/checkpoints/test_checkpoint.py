"""Stop and resume: the next steps are those of a run that never stopped."""

import pickle
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import save_checkpoint
from vime.config import CheckpointConfig, TrainConfig
from vime.errors import ConfigError, TrainingError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import load_checkpoint, open_checkpoint
from vime.loop.checkpoint_writing import CheckpointWriting
from vime.trainer.megatron.checkpoints.shard_file import ShardFile

LENGTHS = [9, 4, 17, 6]
SCHEDULE = TrainConfig(lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=10)


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer._hf_tensors()}


def stored(folder):
    """Every file of a checkpoint but its table of contents, which has a random name in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".metadata"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_takes_the_same_steps(model_folder, make_trainer, make_batch, tmp_path, dtype):
    folder, _ = model_folder(dtype=dtype)
    batches = [make_batch(LENGTHS, seed=s) for s in range(5)]
    straight = make_trainer(folder, train=SCHEDULE, megatron={"lr": 1e-2})
    for batch in batches[:3]:
        straight.train(batch)
    straight.save(tmp_path / "ck")
    want = [straight.train(batch) for batch in batches[3:]]
    want_weights = weights_of(straight)
    resumed = make_trainer(folder, train=SCHEDULE, megatron={"lr": 1e-2})
    resumed.load(tmp_path / "ck")
    got = [resumed.train(batch) for batch in batches[3:]]
    for a, b in zip(got, want, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr-pg_0", "train/step"):
            assert a[name] == b[name], name
    assert all(torch.equal(t, want_weights[n]) for n, t in resumed._hf_tensors())


def test_weights_alone_can_be_resumed(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder(dtype=torch.bfloat16)
    batch = make_batch(LENGTHS)
    bare = CheckpointConfig(no_save_optim=True, no_load_optim=True)
    trainer = make_trainer(folder, checkpoint=bare, megatron={"lr": 1e-2})
    trainer.train(batch)
    want = weights_of(trainer)
    trainer.save(tmp_path / "ck")
    with pytest.raises(ConfigError, match="--no-load-optim"):
        make_trainer(folder).load(tmp_path / "ck")
    trainer = make_trainer(folder, checkpoint=bare, megatron={"lr": 0.0})
    trainer.load(tmp_path / "ck")
    assert all(torch.equal(t, want[n]) for n, t in trainer._hf_tensors())
    trainer.train(batch)  # the master weights must be the loaded ones, not those of the HF checkpoint
    assert all(torch.equal(t, want[n]) for n, t in trainer._hf_tensors())


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_folder_that_is_no_checkpoint_is_refused(model_folder, make_trainer, tmp_path):
    folder, _ = model_folder()
    with pytest.raises(ConfigError, match="not a training checkpoint"):
        make_trainer(folder).load(tmp_path)


def test_each_file_that_rots_is_an_error_that_names_the_checkpoint(model_folder, make_trainer, tmp_path):
    """Of the right size, so that nothing shows before it is read."""
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    trainer.save(tmp_path / "ck")
    files = sorted((tmp_path / "ck").iterdir())
    assert [path.name for path in files] == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    for path in files:
        whole = path.read_bytes()
        for bad in (bytes(len(whole)), bytes(255 - byte for byte in whole[:100]) + whole[100:], b""):
            path.write_bytes(bad)
            with pytest.raises(TrainingError, match=r"ck cannot be read \(\w+: [^\n]*\)$"):
                trainer.load(tmp_path / "ck")
        path.write_bytes(whole)
    trainer.load(tmp_path / "ck")


def test_code_in_a_checkpoint_is_not_run(model_folder, make_trainer, tmp_path):
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    trainer.save(tmp_path / "ck")
    for name in (".metadata", "common.pt"):
        path = tmp_path / "ck" / name
        whole = path.read_bytes()
        path.write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
        with pytest.raises(TrainingError, match="ck cannot be read"):
            trainer.load(tmp_path / "ck")
        assert not (tmp_path / "ran").exists(), name
        path.write_bytes(whole)
    trainer.load(tmp_path / "ck")


def test_a_save_that_fails_leaves_nothing_under_the_final_name(model_folder, make_trainer, tmp_path, monkeypatch):
    from vime.trainer.megatron.checkpoints import checkpoint

    folder, _ = model_folder()
    trainer = make_trainer(folder)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        trainer.save(tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_all_ranks(model_folder, make_trainer, tmp_path):
    folder, _ = model_folder()
    (tmp_path / "file").touch()
    trainer = make_trainer(folder)
    with pytest.raises(TrainingError, match=r"checkpoint .*file/ck cannot be written: rank 0: .*Not a directory"):
        trainer.save(tmp_path / "file" / "ck")
    trainer.save(tmp_path / "ck")


def test_saving_again_replaces_the_old_checkpoint(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    trainer.save(tmp_path / "ck")
    trainer.train(make_batch(LENGTHS))
    trainer.save(tmp_path / "ck")
    want = weights_of(trainer)
    trainer = make_trainer(folder)
    trainer.load(tmp_path / "ck")
    assert all(torch.equal(t, want[n]) for n, t in trainer._hf_tensors())


@pytest.mark.parametrize("style", ["cosine", "WSD", "constant"])
def test_the_learning_rate_goes_by_optimizer_steps_also_after_a_resume(
    model_folder, make_trainer, make_batch, tmp_path, style
):
    """Four rollouts of two steps each, stopped after the second: steps 4 to 7 have the rates of the straight run."""
    schedule = TrainConfig(lr_decay_style=style, lr_warmup_iters=2)
    folder, _ = model_folder()
    make = {"train": schedule, "megatron": {"lr": 1e-2}, "total_steps": 8}
    batches = [make_batch(LENGTHS, seed=s, steps=2) for s in range(4)]
    straight = make_trainer(folder, **make)
    rates = [straight.train(batch)["train/lr-pg_0"] for batch in batches[:2]]
    straight.save(tmp_path / "ck")
    want = [straight.train(batch) for batch in batches[2:]]
    resumed = make_trainer(folder, **make)
    resumed.load(tmp_path / "ck")
    got = [resumed.train(batch) for batch in batches[2:]]
    for a, b in zip(got, want, strict=True):
        for name in ("train/lr-pg_0", "train/loss", "train/step"):
            assert a[name] == b[name], name
    assert [m["train/step"] for m in got] == [6.0, 8.0]
    # The logged rate is of a rollout's last step, numbered from 0: steps 1, 3, 5, 7. Warm-up takes 2, the rest decays.
    expected = {
        "constant": [0.5e-2, 1e-2, 1e-2, 1e-2],
        "cosine": [0.5e-2, *(0.5e-2 * (1 + np.cos(np.pi * (step - 2) / 6)) for step in (3, 5, 7))],
        "WSD": [0.5e-2, 1e-2, 1e-2, 1e-2],
    }
    assert [*rates, *(m["train/lr-pg_0"] for m in got)] == pytest.approx(expected[style])


def test_a_resumed_run_uses_its_own_rates_and_betas(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    trainer = make_trainer(folder, megatron={"lr": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.9})
    trainer.train(make_batch(LENGTHS))
    trainer.save(tmp_path / "ck")
    trainer = make_trainer(
        folder, megatron={"lr": 1e-3, "weight_decay": 0.0, "adam_beta2": 0.99}, train=SCHEDULE, total_steps=7
    )
    trainer.load(tmp_path / "ck")
    group = trainer._policy.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"][1], group["max_lr"]) == (0.0, 0.99, 1e-3)
    # SCHEDULE warms up over two steps; one was made before the resume.
    assert trainer.train(make_batch(LENGTHS))["train/lr-pg_0"] == 0.5e-3


def test_finetuning_takes_the_weights_and_begins_anew(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    trainer = make_trainer(folder, megatron={"lr": 1e-2})
    trainer.train(make_batch(LENGTHS))
    trainer.save(tmp_path / "ck")
    want = weights_of(trainer)
    trainer = make_trainer(folder, checkpoint=CheckpointConfig(finetune=True), train=SCHEDULE, megatron={"lr": 1e-2})
    trainer.load(tmp_path / "ck")
    assert all(torch.equal(t, want[n]) for n, t in trainer._hf_tensors())
    metrics = trainer.train(make_batch(LENGTHS))
    assert (metrics["train/step"], metrics["train/lr-pg_0"]) == (1.0, 0.0), "the first step of a warm-up from 0"


class Prompts:
    """As much of a data source as a checkpoint asks for."""

    def __init__(self, offset=0):
        self.offset = offset

    def state(self):
        return {"offset": self.offset}

    def restore(self, state):
        self.offset = state["offset"]


def test_a_disk_that_is_full_costs_that_checkpoint_alone(model_folder, make_trainer, make_batch, tmp_path):
    """Megatron's own writers stopped by the system in the middle of a file; a limit on files stands for the disk."""
    folder, _ = model_folder()
    trainer = make_trainer(folder, megatron={"lr": 1e-2})
    saved = tmp_path / "checkpoints"
    save_checkpoint(saved, 0, trainer, Prompts(8), StopRule(), {})
    want = weights_of(trainer)
    trainer.train(make_batch(LENGTHS))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, before[1]))
    try:
        with pytest.raises(TrainingError, match=r"cannot be written: rank 0: .*File too large"):
            save_checkpoint(saved, 1, trainer, Prompts(16), StopRule(), {})
        writing = CheckpointWriting(saved, 1, trainer, Prompts(16).state(), StopRule(), {}, in_background=True)
        trainer.train(make_batch(LENGTHS))
        with pytest.raises(TrainingError, match=r"cannot be written: rank 0: .*File too large"):
            writing.complete(wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in saved.iterdir()] == ["rollout_000000"]
    resumed, prompts = make_trainer(folder), Prompts()
    load_checkpoint(open_checkpoint(saved), resumed, prompts, StopRule())
    assert prompts.offset == 8
    assert all(torch.equal(tensor, want[name]) for name, tensor in resumed._hf_tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distributed", [True, False])
def test_a_save_in_the_background_holds_the_step_it_was_begun_at(
    model_folder, make_trainer, make_batch, tmp_path, dtype, distributed
):
    folder, _ = model_folder(dtype=dtype)
    trainer = make_trainer(folder, megatron={"lr": 1e-2, "use_distributed_optimizer": distributed})
    trainer.train(make_batch(LENGTHS))
    trainer.save(tmp_path / "at once")
    write, release = ShardFile.add, threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is written before the next step has changed every tensor.
        patch.setattr(ShardFile, "add", lambda *args: (release.wait(60), write(*args)))
        trainer.begin_save(tmp_path / "in the background")
        assert not trainer.end_save(wait=False)
        after = trainer.train(make_batch(LENGTHS, seed=1))
        assert not trainer.end_save(wait=False) and not (tmp_path / "in the background").exists()
        release.set()
        assert trainer.end_save(wait=True)
    want = stored(tmp_path / "at once")
    assert want.keys() == {"__0_0.distcp", "common.pt", "metadata.json"}
    assert stored(tmp_path / "in the background") == want
    resumed = make_trainer(folder, megatron={"lr": 1e-2, "use_distributed_optimizer": distributed})
    resumed.load(tmp_path / "in the background")
    assert resumed.train(make_batch(LENGTHS, seed=1))["train/loss"] == after["train/loss"]
