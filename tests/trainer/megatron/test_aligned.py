"""--aligned in the trainer on a CPU: other sums, the same loss and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.megatron.test_trainer import LENGTHS, SGD_LIKE, gradient_of
from vime.config import AlgoConfig, TrainConfig


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])  # the second one's layers have biases
def test_loss_and_gradients_are_those_of_ordinary_products(model_folder, make_trainer, make_batch, kind):
    folder, _ = model_folder(kind)
    batch, found = make_batch(LENGTHS, micro=3), {}
    for aligned in (True, False):
        algo = AlgoConfig(entropy_coef=0.01)
        trainer = make_trainer(folder, train=TrainConfig(aligned=aligned), algo=algo, megatron=SGD_LIKE)
        log_probs = trainer.log_probs(batch)
        found[aligned] = log_probs, trainer.train(batch), gradient_of(trainer)
    (log_probs, metrics, gradient), (want, want_metrics, want_gradient) = found[True], found[False]
    assert not np.array_equal(log_probs, want, equal_nan=True), "they are summed in another order"
    np.testing.assert_allclose(log_probs, want, atol=1e-6)
    for name in ("train/loss", "train/entropy_loss", "train/grad_norm"):
        assert metrics[name] == pytest.approx(want_metrics[name], rel=1e-5, abs=1e-7)
    assert want_gradient.norm() > 0.01
    torch.testing.assert_close(gradient, want_gradient, atol=1e-6, rtol=1e-4)
