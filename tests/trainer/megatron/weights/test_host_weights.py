"""Weights in host memory trade places with the model's own: bit for bit, and back."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.test_trainer import LENGTHS
from vime.config import AlgoConfig, CheckpointConfig
from vime.trainer.megatron.weights import host_weights
from vime.trainer.megatron.weights.host_weights import HostWeights

KL = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1)


def bytes_of_all(trainer):
    """Copies of all that a trainer computes with or updates."""
    tensors = [*trainer._parts._weights(), *trainer._parts._state(), *trainer._policy.grad_buffers()]
    return [t.detach().cpu().clone() for t in tensors]


def test_two_sets_trade_places_and_come_back(monkeypatch):
    monkeypatch.setattr(host_weights, "SWAP_BUFFER_BYTES", 48)  # several blocks, the last of them short
    flat = torch.arange(25.0)
    model = torch.nn.Linear(5, 3)
    model.weight.data, model.bias.data = flat[:15].view(3, 5), flat[15:18]  # views of one buffer, as DDP makes them
    model.register_buffer("counts", torch.arange(3, dtype=torch.int64))
    kept = HostWeights([model])
    own = flat.clone()
    flat += 100
    with kept.in_place():
        assert torch.equal(flat, own) and torch.equal(model.weight, own[:15].view(3, 5))
        model.counts += 1
    assert torch.equal(flat, own + 100) and model.counts.tolist() == [0, 1, 2]
    assert torch.equal(kept.kept(model.weight.detach()), own[:15].view(3, 5))
    assert kept.kept(model.counts).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError), kept.in_place():
        raise RuntimeError
    assert torch.equal(flat, own + 100)  # also after an error
    kept.take()
    assert torch.equal(kept.kept(model.bias.detach()), own[15:18] + 100)
    with pytest.raises(ValueError, match="no view of the model's weights"):
        kept.kept(torch.zeros(2))


@pytest.mark.parametrize(
    ("kind", "dtype", "tied"),
    [("qwen3", torch.float32, True), ("qwen3", torch.bfloat16, False), ("glm4_moe", torch.bfloat16, True)],
)
def test_a_reference_is_what_a_model_of_its_own_would_say(
    model_folder, make_trainer, make_batch, kind, dtype, tied, monkeypatch
):
    """The same bits as the reference trained from gives, and nothing of the policy has moved."""
    folder, _ = model_folder(kind, dtype=dtype, tied=tied)
    other, _ = model_folder(kind, dtype=dtype, tied=tied, seed=9)
    batch = make_batch(LENGTHS, micro=3)
    want = make_trainer(other).log_probs(batch)
    trainer = make_trainer(folder, algo=KL, checkpoint=CheckpointConfig(ref_load=str(other)))
    for _ in range(2):
        before = bytes_of_all(trainer)
        with trainer._others.reference.in_place():
            got = trainer.log_probs(batch)
        assert np.array_equal(got, want, equal_nan=True)
        assert all(torch.equal(a, b) for a, b in zip(bytes_of_all(trainer), before, strict=True))
        trainer.train(batch)


def test_training_beside_a_reference_is_training_without_one(model_folder, make_trainer, make_batch):
    """Where the KL weighs nothing: the swap leaves no trace in weights and optimizer."""
    folder, _ = model_folder()
    other, _ = model_folder(seed=9)
    batch, results = make_batch(LENGTHS, micro=3), []
    for algo in (AlgoConfig(), replace(KL, kl_loss_coef=1e-30)):
        trainer = make_trainer(folder, algo=algo, checkpoint=CheckpointConfig(ref_load=str(other)))
        trainer.train(batch)
        trainer.train(batch)
        results.append(bytes_of_all(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_reference_of_another_dtype_is_named(model_folder, make_trainer, caplog):
    folder, _ = model_folder(dtype=torch.bfloat16)
    other, _ = model_folder(dtype=torch.float32, seed=9)
    with caplog.at_level(logging.WARNING):
        make_trainer(folder, algo=KL, checkpoint=CheckpointConfig(ref_load=str(other)))
    assert f"--ref-load {other} is stored in float32 and is rounded to bfloat16" in caplog.text


@pytest.mark.parametrize("distributed", [True, False])
def test_a_reference_that_moves_is_saved_and_resumed(
    model_folder, make_trainer, make_batch, tmp_path, caplog, distributed
):
    """It becomes the policy after rollouts 1 and 3, and is what it was when the run goes on."""
    folder, _ = model_folder("glm4_moe", dtype=torch.bfloat16)
    other, _ = model_folder("glm4_moe", dtype=torch.bfloat16, seed=9)
    settings = dict(
        algo=replace(KL, ref_update_interval=2),
        checkpoint=CheckpointConfig(ref_load=str(other)),
        megatron={"lr": 1e-2, "use_distributed_optimizer": distributed},
    )
    batches = [replace(make_batch(LENGTHS, micro=3, seed=k), rollout_id=k) for k in range(4)]
    trainer = make_trainer(folder, **settings)
    policy, moved, metrics = [], [], []
    for k, batch in enumerate(batches):
        metrics.append(trainer.train(batch))
        policy.append(trainer.log_probs(batches[0]))
        with trainer._others.reference.in_place():
            moved.append(trainer.log_probs(batches[0]))
        if k == 2:
            trainer.begin_save(tmp_path / "after 2")  # in the background: what follows is not in it
    trainer.end_save(wait=True)
    assert [m["train/reference_rollout"] for m in metrics] == [-1, 1, 1, 3]
    assert np.array_equal(moved[1], policy[1], equal_nan=True) and np.array_equal(moved[3], policy[3], equal_nan=True)
    assert not np.array_equal(moved[0], moved[1], equal_nan=True)

    resumed = make_trainer(folder, **settings)
    with caplog.at_level(logging.WARNING):
        resumed.load(tmp_path / "after 2")
    assert f"after rollout 1, not --ref-load {other}" in caplog.text
    got = resumed.train(batches[3])
    assert {n: v for n, v in got.items() if n.startswith("train/")} == {
        n: v for n, v in metrics[3].items() if n.startswith("train/")
    }
    assert np.array_equal(resumed.log_probs(batches[0]), policy[3], equal_nan=True)
    anew = make_trainer(folder, **(settings | {"checkpoint": CheckpointConfig(ref_load=str(other), finetune=True)}))
    anew.load(tmp_path / "after 2")
    with anew._others.reference.in_place():
        assert np.array_equal(anew.log_probs(batches[0]), moved[0], equal_nan=True)


def test_a_run_that_begins_with_weights_of_a_checkpoint_has_them_as_its_reference(
    model_folder, make_trainer, make_batch, tmp_path, caplog
):
    """With --finetune, unless --ref-load names another; and when that run goes on from its own checkpoint."""
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=3)
    trainer = make_trainer(folder, megatron={"lr": 1e-2})
    trainer.train(batch)
    trainer.save(tmp_path / "before")
    begin = trainer.log_probs(batch)

    def of_reference(trainer):
        with trainer._others.reference.in_place():
            return trainer.log_probs(batch)

    named = make_trainer(folder, algo=KL, checkpoint=CheckpointConfig(finetune=True, ref_load=str(folder)))
    other = of_reference(named)
    named.load(tmp_path / "before")
    assert np.array_equal(of_reference(named), other, equal_nan=True)
    tuned = make_trainer(folder, algo=KL, checkpoint=CheckpointConfig(finetune=True), megatron={"lr": 1e-2})
    tuned.load(tmp_path / "before")
    assert "train/reference_rollout" not in tuned.train(batch)
    tuned.save(tmp_path / "after")
    assert np.array_equal(of_reference(tuned), begin, equal_nan=True)
    assert not np.array_equal(begin, other, equal_nan=True)
    resumed = make_trainer(folder, algo=KL)
    with caplog.at_level(logging.WARNING):
        resumed.load(tmp_path / "after")
    assert "the reference is the checkpoint's, of the weights that its run began with" in caplog.text
    assert np.array_equal(of_reference(resumed), begin, equal_nan=True)
    assert not np.array_equal(resumed.log_probs(batch), begin, equal_nan=True)
