"""Megatron's settings of the optimizer that are passed on: each changes the update as it says."""

import pytest
import torch

LENGTHS = [9, 4, 17, 6]
LR, DECAY, EPS = 0.01, 0.1, 100.0
LIKE_SGD = {"adam_beta1": 0.0, "adam_beta2": 0.0, "adam_eps": EPS, "clip_grad": 0.0, "lr": LR}
NORMS_OF_HEADS = ("q_norm.weight", "k_norm.weight")


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer._hf_tensors()}


def step_with(make_trainer, folder, batch, **megatron):
    """Weights before and after one step."""
    trainer = make_trainer(folder, megatron={**LIKE_SGD, **megatron})
    before = weights_of(trainer)
    trainer.train(batch)
    return before, weights_of(trainer)


@pytest.mark.parametrize(
    ("flags", "of_heads", "factor"),
    [
        ({}, False, LR * DECAY),
        ({"apply_wd_to_qk_layernorm": True}, True, LR * DECAY),
        ({"decoupled_weight_decay": False}, False, LR / EPS * DECAY),  # part of the gradient, which is divided by eps
    ],
)
def test_weight_decay_takes_its_part_of_matrices_and_of_what_else_is_said(
    model_folder, make_trainer, make_batch, flags, of_heads, factor
):
    folder, _ = model_folder("qwen3")
    batch = make_batch(LENGTHS)
    before, without = step_with(make_trainer, folder, batch, weight_decay=0.0)
    _, with_decay = step_with(make_trainer, folder, batch, weight_decay=DECAY, **flags)
    for name, weight in before.items():
        decays = weight.dim() > 1 or (of_heads and name.endswith(NORMS_OF_HEADS))
        want = factor * weight if decays else torch.zeros_like(weight)
        # Adam divides by |gradient| + eps, of which the latter is nearly all.
        assert torch.allclose(without[name] - with_decay[name], want, rtol=2e-2, atol=1e-7), name


@pytest.mark.parametrize(("betas", "is_sign"), [((0.0, 0.0), True), ((0.9, 0.0), False), ((0.0, 0.9), False)])
def test_without_memory_adam_moves_every_weight_by_the_learning_rate(
    model_folder, make_trainer, make_batch, betas, is_sign
):
    folder, _ = model_folder()
    flags = {"lr": LR, "weight_decay": 0.0, "adam_beta1": betas[0], "adam_beta2": betas[1], "adam_eps": 1e-30}
    trainer = make_trainer(folder, megatron=flags)
    trainer.train(make_batch(LENGTHS, seed=1))
    before = weights_of(trainer)
    trainer.train(make_batch(LENGTHS, seed=2))
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (weights_of(trainer)[name] - before[name]).abs()
    assert torch.allclose(moved, torch.full_like(moved, LR), rtol=1e-3) == is_sign


def test_a_run_with_these_settings_goes_on_as_if_it_had_not_stopped(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    flags = {"decoupled_weight_decay": False, "apply_wd_to_qk_layernorm": True, "pad_buckets_for_high_nccl_busbw": True}
    make = {"megatron": {"lr": LR, "weight_decay": DECAY, **flags}}
    batches = [make_batch(LENGTHS, seed=s) for s in range(3)]
    straight = make_trainer(folder, **make)
    assert all(buffer.numel() % 2**16 == 0 for buffer in straight._policy.grad_buffers())
    for batch in batches[:2]:
        straight.train(batch)
    straight.save(tmp_path / "ck")
    straight.train(batches[2])
    want = weights_of(straight)
    resumed = make_trainer(folder, **make)
    resumed.load(tmp_path / "ck")
    resumed.train(batches[2])
    assert all(torch.equal(t, want[n]) for n, t in resumed._hf_tensors())
