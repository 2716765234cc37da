"""The real trainer on a tiny model: agreement with transformers, the step's invariants, its errors."""

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from vime.config import AlgoConfig, CheckpointConfig, RolloutConfig, SyncConfig, TrainConfig
from vime.errors import ConfigError, TrainingError
from vime.wire import BucketMessage

LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]
SGD_LIKE = {"adam_eps": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}  # an update proportional to the gradient
MISMATCH = "train/train_rollout_logprob_abs_diff"


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer._hf_tensors()}


def gradient_of(trainer):
    return torch.cat([p.main_grad.flatten() for p in trainer._policy.chunks[0].parameters()]).clone()


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(
    model_folder, make_trainer, make_batch, hf_log_probs, kind, tied, temperature
):
    folder, model = model_folder(kind, tied=tied)
    batch = make_batch(LENGTHS, micro=3)
    trainer = make_trainer(folder, rollout=RolloutConfig(rollout_temperature=temperature))
    got, want = trainer.log_probs(batch), hf_log_probs(model, batch, temperature)
    assert got.dtype == np.float32 and (np.isnan(got) == np.isnan(want)).all()
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_gradients_are_those_of_transformers(model_folder, make_trainer, make_batch):
    folder, model = model_folder("qwen3", tied=True)
    batch = make_batch(LENGTHS, micro=3)
    trainer = make_trainer(folder, algo=AlgoConfig(loss_type="sft_loss"), megatron=SGD_LIKE)
    before = weights_of(trainer)
    trainer.train(batch)
    total = 0.0
    for i in range(batch.num_samples):
        rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        ids = torch.from_numpy(batch.tokens[rows].astype(np.int64))[None]
        log_p = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        total = total - (torch.from_numpy(batch.loss_weights[rows][1:]) * log_p).sum()
    total.backward()
    # With eps 1, Adam's first update is lr * g / (|g| + 1).
    for name, p in model.named_parameters():
        if name in before:
            step = (before[name] - dict(trainer._hf_tensors())[name]) / 1e-3
            torch.testing.assert_close(step, p.grad / (p.grad.abs() + 1), atol=2e-4, rtol=1e-3, msg=name)


def test_forward_micro_batches_may_be_larger_than_those_with_gradients(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=1)
    want = make_trainer(folder).log_probs(batch)
    for limit in (20, 1000):
        trainer = make_trainer(folder, train=TrainConfig(log_probs_max_tokens_per_gpu=limit))
        np.testing.assert_allclose(trainer.log_probs(batch), want, atol=1e-6)


def test_scores_are_at_temperature_one_and_start_with_nan(model_folder, make_trainer, make_batch, hf_log_probs):
    folder, model = model_folder("llama")
    batch = make_batch([6, 3])
    trainer = make_trainer(folder, rollout=RolloutConfig(rollout_temperature=0.5))
    got = trainer.score([batch.tokens[:6].tolist(), batch.tokens[6:9].tolist()])
    assert [len(s) for s in got] == [6, 3]
    np.testing.assert_allclose(np.concatenate(got), hf_log_probs(model, batch), atol=1e-5)


@pytest.mark.parametrize("algo", [{}, {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}])
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_packing(model_folder, make_trainer, make_batch, algo):
    folder, _ = model_folder()
    results = []
    for micro in (None, 3, 1):
        trainer = make_trainer(folder, algo=AlgoConfig(**algo), megatron=SGD_LIKE)
        metrics = trainer.train(make_batch(LENGTHS, micro=micro))
        results.append((metrics, gradient_of(trainer)))
    (want, want_grad), *others = results
    for got, grad in others:
        for name in ("train/loss", "train/pg_loss", "train/entropy_loss", "train/grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-5)
        assert ((grad - want_grad).norm() / want_grad.norm()).item() < 1e-5


@pytest.mark.parametrize("steps", [1, 2])
def test_the_old_policy_is_the_one_that_sampled(model_folder, make_trainer, make_batch, steps):
    """The trainer's own before the first step, unless an earlier version sampled, of which only log-probs are left."""
    folder, _ = model_folder()

    def train(sampled, *, is_older=False):
        batch = make_batch(LENGTHS, steps=steps, rollout_log_probs=np.full(sum(LENGTHS), sampled))
        trainer = make_trainer(folder)
        before = trainer.log_probs(batch)[batch.loss_mask != 0]
        return trainer.train(replace(batch, is_older=is_older)), before

    (own, before), (differing, _), (older, _) = train(-4.0), train(-4.7), train(-4.7, is_older=True)
    for name in ("train/loss", "train/pg_loss", "train/ppo_kl", "train/pg_clipfrac", "train/grad_norm"):
        assert differing[name] == own[name], (
            f"{name}: what the engine says of the trainer's own version is no part of it"
        )
    assert (own["train/ppo_kl"] == 0) == (steps == 1), "only a second step finds the policy moved"
    assert older["train/train_rollout_logprob_abs_diff"] == differing["train/train_rollout_logprob_abs_diff"]
    if steps == 1:
        weights = make_batch(LENGTHS).loss_weights[make_batch(LENGTHS).loss_mask != 0]
        assert older["train/ppo_kl"] == pytest.approx(float((weights * (-4.7 - before)).sum()), rel=1e-5)
    assert older["train/pg_clipfrac"] > 0.1 and older["train/pg_loss"] != own["train/pg_loss"]


def test_chunk_size_and_recomputation_change_nothing(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS)
    want = make_trainer(folder).train(batch)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    for train, megatron in ((TrainConfig(log_probs_chunk_size=5), full), (TrainConfig(), selective)):
        got = make_trainer(folder, train=train, megatron=megatron).train(batch)
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-5)


def test_one_step_needs_no_old_policy_forward_and_gives_the_same_numbers(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    one = make_trainer(folder).train(make_batch(LENGTHS))
    assert "perf/log_probs_time" not in one
    two = make_trainer(folder).train(make_batch(LENGTHS, steps=2))
    assert "perf/log_probs_time" in two and two["train/step"] == 2
    for name in (MISMATCH, f"{MISMATCH}_p99", f"{MISMATCH}_max"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)
    assert one["train/ppo_kl"] == 0.0 and two["train/ppo_kl"] != 0.0


def test_the_mismatch_is_taken_before_the_first_update(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder, megatron={"lr": 0.05})
    exact = make_batch(LENGTHS)
    exact = make_batch(LENGTHS, steps=2, rollout_log_probs=trainer.log_probs(exact))
    assert trainer.train(exact)[f"{MISMATCH}_max"] < 1e-6
    assert trainer.train(exact)[f"{MISMATCH}_max"] > 1e-3


def test_kl_is_zero_until_the_policy_moves_and_the_reference_stays(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder, algo=AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1), megatron={"lr": 0.01})
    batch = make_batch(LENGTHS)
    first, second = trainer.train(batch), trainer.train(batch)
    assert first["train/kl_loss"] == 0.0 and second["train/kl_loss"] > 1e-5
    assert "perf/ref_log_probs_time" in first
    # The metrics come from float32 sums, so the parts only add up to their precision.
    assert second["train/loss"] == pytest.approx(second["train/pg_loss"] + 0.1 * second["train/kl_loss"], rel=1e-5)


@pytest.mark.parametrize("change", [{}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}])
def test_a_reference_of_another_shape_is_refused(model_folder, make_trainer, change):
    folder, _ = model_folder("qwen3")
    other, _ = model_folder("qwen3" if change else "llama")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match="--ref-load"):
        make_trainer(folder, algo=AlgoConfig(use_kl_loss=True), checkpoint=CheckpointConfig(ref_load=str(other)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supervised_training_lowers_its_loss(model_folder, make_trainer, make_batch, dtype):
    folder, _ = model_folder(dtype=dtype)
    trainer = make_trainer(folder, algo=AlgoConfig(loss_type="sft_loss"), megatron={"lr": 0.01})
    batch = make_batch(LENGTHS, micro=4)
    losses = [trainer.train(batch)["train/loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_bf16_stays_close_to_float32(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS)
    want = make_trainer(folder).train(batch)
    got = make_trainer(folder, megatron={"bf16": True}).train(batch)
    assert got["train/entropy_loss"] == pytest.approx(want["train/entropy_loss"], rel=0.02)
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.1)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_bf16_rounds_no_more_than_transformers_does(model_folder, make_trainer, make_batch, hf_log_probs, kind):
    folder, model = model_folder(kind, dtype=torch.bfloat16)
    batch = make_batch([40, 30, 50, 20] * 4)
    ours, theirs = make_trainer(folder).log_probs(batch), hf_log_probs(model, batch)
    exact = hf_log_probs(model.float(), batch)
    assert np.nanmean(np.abs(ours - exact)) < 1.1 * np.nanmean(np.abs(theirs - exact))


@pytest.mark.parametrize("column", ["advantages", "loss_weights"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(model_folder, make_trainer, make_batch, column):
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    batch = make_batch(LENGTHS)
    getattr(batch, column)[-1] = np.inf
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match="rank 0, rollout 7, step 0"):
        trainer.train(batch)
    assert all(torch.equal(t, before[n]) for n, t in trainer._hf_tensors())


def test_a_token_outside_the_vocabulary_is_named(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    batch = make_batch(LENGTHS)
    batch.tokens[3] = 10_000
    with pytest.raises(TrainingError, match="to 10000, the model's vocabulary has"):
        trainer.train(batch)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    norm = trainer._policy.chunks[0].decoder.final_layernorm.weight
    hook = norm.register_hook(lambda grad: grad * float("nan"))
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match="gradient is not finite on rank 0, rollout 7, step 0"):
        trainer.train(make_batch(LENGTHS))
    hook.remove()
    assert all(torch.equal(t, before[n]) for n, t in trainer._hf_tensors())


def test_the_learning_rate_follows_its_schedule(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    schedule = TrainConfig(lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=6)
    trainer = make_trainer(folder, train=schedule, megatron={"lr": 1e-3, "min_lr": 1e-4})
    batch = make_batch([5, 5])
    rates = [trainer.train(batch)["train/lr-pg_0"] for _ in range(8)]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4])


def test_clipping_bounds_the_update_but_not_the_reported_norm(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS)
    moved = {}
    for clip in (0.0, 1e-3):
        trainer = make_trainer(folder, megatron={**SGD_LIKE, "lr": 0.1, "clip_grad": clip})
        before = weights_of(trainer)
        norm = trainer.train(batch)["train/grad_norm"]
        moved[clip] = sum((before[n] - t).square().sum() for n, t in trainer._hf_tensors()).sqrt().item()
        assert norm > 1e-2
    assert moved[1e-3] == pytest.approx(0.1 * 1e-3, rel=1e-2) and moved[0.0] > 10 * moved[1e-3]


class KeepingWriter:
    """Keeps copies of what it is given."""

    def __init__(self):
        self.buckets, self.closed = [], False

    def write(self, outlines, contents, version, index):
        self.buckets.append([(name, tensor.clone()) for (name, _), tensor in zip(outlines, contents, strict=True)])
        return BucketMessage(version, index, (), 0, {})

    def close(self):
        self.closed = True


def test_weights_go_out_by_hf_name_in_buckets(model_folder, make_trainer):
    folder, model = model_folder(tied=True)
    writer = KeepingWriter()
    trainer = make_trainer(folder, writer=writer, sync=SyncConfig(update_weight_buffer_size=30_000))
    messages = list(trainer.weights(3))
    sent = [pair for bucket in writer.buckets for pair in bucket]
    assert [m.index for m in messages] == list(range(len(messages))) and len(messages) > 2
    assert {m.version for m in messages} == {3}
    assert [name for name, _ in sent] == trainer.weight_names()
    want = {name: p for name, p in model.named_parameters()}
    assert {name for name, _ in sent} == set(want)
    assert all(torch.equal(tensor, want[name]) for name, tensor in sent)
    trainer.close()
    assert writer.closed


def test_a_closed_trainer_leaves_nothing_behind(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder)
    trainer.train(make_batch([9, 4]))
    policy = trainer._policy
    parts = [weakref.ref(part) for part in (*policy.ddps, policy.optimizer)]
    trainer.close()
    del trainer, policy
    make_trainer(folder)  # the fixture lets go of the one before
    gc.collect()
    assert [part() for part in parts] == [None] * 2
