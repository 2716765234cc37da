"""The trainer's log-probs, loss and metrics over what the engine could have sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.layout_case import some_support
from tests.trainer.megatron.test_losses import FAST, LENGTHS
from vime.config import AlgoConfig, CheckpointConfig, RolloutConfig, TrainConfig

HOT = RolloutConfig(rollout_temperature=0.7)


def over_support(model, batch, temperature):
    """[T] log-probs and entropies by transformers, in float64, each over its token's support."""
    log_probs, entropies = np.full((2, len(batch.tokens)), np.nan)
    for i in range(batch.num_samples):
        start, end = batch.cu_seqlens[i : i + 2]
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].double() / temperature
        for k in range(start + 1, end):
            kept = batch.support.ids[batch.support.starts[k] : batch.support.starts[k + 1]]
            row = logits[k - start - 1]
            log_p = (
                row
                if not len(kept)
                else torch.full_like(row, -torch.inf).index_copy(
                    0, torch.from_numpy(kept).long(), row[torch.from_numpy(kept).long()]
                )
            ).log_softmax(-1)
            log_probs[k] = log_p[ids[k - start]]
            entropies[k] = -(log_p.exp() * log_p)[log_p > -torch.inf].sum()
    return log_probs, entropies


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_log_probs_and_entropy_are_of_the_support(model_folder, make_trainer, make_batch, chunk_size):
    folder, model = model_folder()
    batch = make_batch(LENGTHS, micro=3)
    batch = replace(batch, support=some_support(batch))
    trainer = make_trainer(folder, rollout=HOT, train=TrainConfig(log_probs_chunk_size=chunk_size))
    want, entropies = over_support(model, batch, 0.7)
    np.testing.assert_allclose(trainer.log_probs(batch), want, atol=1e-5)
    plain = trainer.log_probs(replace(batch, support=None))
    on = batch.loss_mask == 1
    got = trainer.train(replace(batch, rollout_log_probs=np.where(on, want, np.nan).astype(np.float32)))
    assert got["train/train_rollout_logprob_abs_diff_max"] < 1e-5
    assert got["train/entropy_loss"] == pytest.approx((batch.loss_weights[on] * entropies[on]).sum(), rel=1e-5)
    assert (want[on] > plain[on] - 1e-5).all() and (want[on] - plain[on]).max() > 0.5


def test_the_reference_is_asked_over_the_same_support(model_folder, make_trainer, make_batch):
    """So that the KL is one of the two distributions that tokens were, and would have been, sampled from."""
    folder, _ = model_folder()
    other, reference = model_folder(seed=9)
    batch = make_batch(LENGTHS)
    batch = replace(batch, support=some_support(batch))
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1)
    trainer = make_trainer(folder, algo=algo, rollout=HOT, checkpoint=CheckpointConfig(ref_load=str(other)))
    on = batch.loss_mask == 1
    d = (trainer.log_probs(batch) - over_support(reference, batch, 0.7)[0])[on]
    want = (batch.loss_weights[on] * (np.exp(-d) - 1 + d)).sum()
    assert trainer.train(batch)["train/kl_loss"] == pytest.approx(want, rel=1e-4)


def test_steps_and_micro_batches_keep_each_token_with_its_support(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, steps=2)
    batch = replace(batch, support=some_support(batch))
    results = []
    for micro in (None, 3, 1):
        plan = make_batch(LENGTHS, micro=micro, steps=2).steps
        algo = AlgoConfig(entropy_coef=0.1)
        metrics = make_trainer(folder, algo=algo, megatron=FAST).train(replace(batch, steps=plan))
        results.append({n: v for n, v in metrics.items() if n.startswith("train/")})
    for got in results[1:]:
        assert got == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in results[0].items()}
