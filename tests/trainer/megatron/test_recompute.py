"""Recomputation: the same loss and gradients, with fewer bytes kept between the forward and the backward pass."""

import subprocess
import sys

import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

from vime.models import family_of
from vime.models.activations import Recompute, stage_numbers
from vime.models.division import Division
from vime.trainer.megatron import train_step
from vime.trainer.megatron.nn import layers
from vime.trainer.megatron.weights import hf_io

FULL = {"recompute_granularity": "full"}
UNIFORM, BLOCK = ({**FULL, "recompute_method": m, "recompute_num_layers": 1} for m in ("uniform", "block"))
LENGTHS = [9, 4, 17, 6, 5, 12]


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


OF_ALL = [
    UNIFORM,
    {**UNIFORM, "recompute_num_layers": 2},
    BLOCK,
    selective("core_attn"),
    selective("layernorm"),
]


class Kept:
    """Bytes that autograd holds, weights left out, when a micro-batch's loss is computed."""

    def __init__(self):
        self.storages, self.weights, self.seen = WeakIdKeyDictionary(), set(), []

    def pack(self, tensor):
        self.storages[tensor.untyped_storage()] = True
        return tensor

    def look(self):
        there = {s.data_ptr(): s.nbytes() for s in self.storages}
        self.seen.append(sum(size for pointer, size in there.items() if pointer not in self.weights))


@pytest.fixture
def kept(monkeypatch):
    kept, micro_loss = Kept(), train_step.micro_loss

    def look(*args, **kwargs):
        kept.look()
        return micro_loss(*args, **kwargs)

    monkeypatch.setattr(train_step, "micro_loss", look)
    return kept


def step(trainer, batch, kept):
    """Loss and gradient of one optimizer step, and the bytes kept."""
    kept.storages.clear()
    kept.weights = {p.untyped_storage().data_ptr() for d in trainer._policy.ddps for p in d.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss = trainer.train(batch)["train/loss"]
    buffers = [b.grad_data for d in trainer._policy.ddps for b in (*d.buffers, *d.expert_parallel_buffers)]
    return loss, torch.cat(buffers).clone(), kept.seen[-1]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3", [selective("mlp"), selective("core_attn", "layernorm", "mlp")]),
        ("qwen3_moe", [selective("moe"), selective("moe_act"), selective("moe_act", "layernorm")]),
        (
            "glm4_moe",
            [
                selective("mlp"),
                selective("moe"),
                selective("shared_experts"),
                selective("core_attn", "layernorm", "mlp", "moe_act", "shared_experts"),
            ],
        ),
    ],
)
def test_loss_and_gradients_are_those_without(model_folder, make_trainer, make_batch, kept, kind, more):
    folder, _ = model_folder(kind)
    batch = make_batch(LENGTHS)
    want, want_grad, most = step(make_trainer(folder), batch, kept)
    for settings in [*OF_ALL, *more]:
        loss, grad, num_bytes = step(make_trainer(folder, megatron=settings), batch, kept)
        assert loss == pytest.approx(want, rel=1e-6), settings
        assert ((grad - want_grad).norm() / want_grad.norm()).item() < 1e-6, settings
        assert num_bytes < most, settings
        print(kind, settings, num_bytes, most)


class _Norm(torch.autograd.Function):
    """Keeps what torch's fused norm on CUDA keeps, but for a number a row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class _Attention(torch.autograd.Function):
    """Keeps what torch's attention over packed sequences keeps, but for a number a head."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q * k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        _, k, v, _ = ctx.saved_tensors
        return grad, torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("qwen3_moe", {}),
        ("glm4_moe", {}),
        ("qwen3", selective("layernorm", "mlp")),
        ("glm4_moe", selective("layernorm", "moe_act", "shared_experts")),
        ("qwen3", UNIFORM),
    ],
)
def test_layers_keep_what_the_estimate_of_memory_says(
    model_folder, make_trainer, make_batch, kept, monkeypatch, kind, settings
):
    """The layers that are trained on CUDA in bf16, with stand-ins for its two kernels that keep the same."""
    monkeypatch.setattr(layers.RMSNorm, "forward", lambda self, x: _Norm.apply(x, self.weight))
    monkeypatch.setattr(layers, "uses_varlen_kernel", lambda *args: True)
    monkeypatch.setattr(layers, "_varlen", lambda q, k, v, packed, scale: _Attention.apply(q, k, v))
    numbers, estimated = [], []
    for count in (2, 4):
        folder, _ = model_folder(kind, dtype=torch.bfloat16, layers=count)
        trainer = make_trainer(folder, megatron={"bias_activation_fusion": True, **settings})
        _, _, num_bytes = step(trainer, make_batch(LENGTHS), kept)
        numbers.append(num_bytes / sum(LENGTHS) / 2)
        hf = hf_io.read_config(folder)
        recompute = Recompute(**{key.removeprefix("recompute_"): value for key, value in settings.items()})
        estimated.append(stage_numbers(family_of(hf).settings(hf), Division(), range(count), recompute))
    assert numbers[1] - numbers[0] == pytest.approx(estimated[1] - estimated[0], rel=0.02)


def test_megatron_still_takes_no_fp8_for_some_in_recomputed_norms():
    code = (
        "from megatron.core.tensor_parallel.random import CheckpointWithoutOutput; print(CheckpointWithoutOutput().fp8)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "True", done.stderr
