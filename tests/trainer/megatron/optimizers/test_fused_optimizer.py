"""One call for all parameters gives what Megatron's loops and torch's plain Adam give."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from vime.platform import get_platform
from vime.trainer.megatron.nn.model import single_optimizers
from vime.trainer.megatron.optimizers import fused_optimizer
from vime.trainer.megatron.patches import cpu_shims

LENGTHS = [9, 4, 17, 6]


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in ((3, 5), (7,), (1,), (0,), (64, 33))]


@pytest.fixture(autouse=True)
def on_a_cpu_without_cuda():
    if not torch.cuda.is_available():
        cpu_shims.install()


def test_norm_and_product_are_those_of_megatrons_loops():
    noop = torch.zeros(1, dtype=torch.int)
    want, _ = local_multi_tensor_l2_norm(1, noop, [tensors(0)], False)
    got, per_tensor = fused_optimizer.l2_norm(1, noop, [tensors(0)], False)
    assert per_tensor is None and got.shape == want.shape
    assert torch.allclose(got, want.cpu(), rtol=1e-6)
    for destination in (None, tensors(1)):
        wanted, source = tensors(0), tensors(0)
        local_multi_tensor_scale(1, noop, [wanted, wanted], 0.3)
        out = source if destination is None else destination
        fused_optimizer.scale(1, noop, [source, out], 0.3)
        assert all(torch.equal(a, b) for a, b in zip(out, wanted, strict=True))


def test_a_trainer_uses_them(model_folder, make_trainer):
    folder, _ = model_folder()
    make_trainer(folder)
    assert clip_grads.l2_norm_impl is fused_optimizer.l2_norm
    assert clip_grads.multi_tensor_scale_impl is fused_optimizer.scale


def test_an_optimizer_without_parameters_as_on_a_stage_of_dense_layers_copies_nothing():
    fused_optimizer.install()
    halves = ("shard_fp32_from_float16_groups", "model_float16_groups", "shard_fp32_groups", "model_fp32_groups")
    groups = {name: [[]] for name in halves}
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
    empty = SimpleNamespace(is_stub_optimizer=False, config=config, **groups)
    DistributedOptimizer._copy_main_params_to_model_params(empty)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_fused_update_is_the_plain_one(model_folder, make_trainer, make_batch, monkeypatch, tmp_path, kind):
    folder, _ = model_folder(kind)
    batch = make_batch(LENGTHS)

    def weights_after(fused, steps=3):
        trainer = make_trainer(folder, megatron={"lr": 1e-2, "weight_decay": 0.1})
        for optimizer in single_optimizers(trainer._policy.optimizer):
            for group in optimizer.optimizer.param_groups:
                group["fused"] = fused
        for _ in range(steps):
            trainer.train(batch)
        return trainer, {name: tensor.clone() for name, tensor in trainer._hf_tensors()}

    _, want = weights_after(None)
    trainer, got = weights_after(True)
    assert all(torch.allclose(got[name], want[name], rtol=1e-5, atol=1e-6) for name in want)
    trainer.save(tmp_path / "ck")
    trainer.train(batch)
    further = {name: tensor.clone() for name, tensor in trainer._hf_tensors()}
    resumed = make_trainer(folder, megatron={"lr": 1e-2, "weight_decay": 0.1})
    resumed.load(tmp_path / "ck")  # into a plain one
    assert not any(g["fused"] for o in single_optimizers(resumed._policy.optimizer) for g in o.optimizer.param_groups)
    resumed.train(batch)
    assert all(torch.allclose(t, further[name], rtol=1e-5, atol=1e-6) for name, t in resumed._hf_tensors())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_update_is_fused_and_survives_a_checkpoint(model_folder, make_trainer, make_batch, tmp_path, dtype):
    folder, _ = model_folder("qwen3", dtype=dtype)
    batch, cuda = make_batch(LENGTHS), get_platform("cuda")
    trainer = make_trainer(folder, platform=cuda, megatron={"lr": 1e-2})
    trainer.train(batch)
    groups = [g for o in single_optimizers(trainer._policy.optimizer) for g in o.optimizer.param_groups]
    assert all(group["fused"] for group in groups if group["params"])
    trainer.save(tmp_path / "ck")
    want = trainer.train(batch)["train/loss"], trainer.train(batch)["train/loss"]
    trainer = make_trainer(folder, platform=cuda, megatron={"lr": 1e-2})
    trainer.load(tmp_path / "ck")
    assert (trainer.train(batch)["train/loss"], trainer.train(batch)["train/loss"]) == pytest.approx(want, rel=1e-4)
    steps = [t for t in trainer._policy.optimizer_tensors() if t.dim() == 0]
    assert {float(t) for t in steps} == {3.0} and all(t.is_cuda for t in steps)
