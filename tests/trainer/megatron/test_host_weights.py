"""Weights in host memory trade places with the model's own: bit for bit, and back."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.test_trainer import LENGTHS
from vime.config import AlgoConfig, CheckpointConfig
from vime.trainer.megatron import host_weights
from vime.trainer.megatron.host_weights import HostWeights

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
        with trainer._reference.in_place():
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
