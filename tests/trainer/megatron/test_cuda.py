"""The same trainer on one CUDA device: bf16 through the packed-sequence kernel, float32 through padded blocks."""

import numpy as np
import pytest
import torch

from vime.config import AlgoConfig, CheckpointConfig
from vime.platform import get_platform
from vime.trainer.megatron.weights.host_weights import SWAP_BUFFER_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = get_platform("cuda")
LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_log_probs_are_those_of_transformers(model_folder, make_trainer, make_batch, hf_log_probs, kind, dtype, bound):
    folder, model = model_folder(kind, dtype=dtype)
    batch = make_batch(LENGTHS, micro=3)
    got, want = make_trainer(folder, platform=CUDA).log_probs(batch), hf_log_probs(model.float(), batch)
    assert (np.isnan(got) == np.isnan(want)).all()
    assert np.nanmax(np.abs(got - want)) < bound


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_offloads_resumes_and_learns(model_folder, make_trainer, make_batch, tmp_path, kind, dtype):
    folder, _ = model_folder(kind, dtype=dtype)
    batch = make_batch(LENGTHS, micro=3)
    sft = {"algo": AlgoConfig(loss_type="sft_loss"), "megatron": {"lr": 1e-2}, "platform": CUDA}
    trainer = make_trainer(folder, **sft)
    losses = [trainer.train(batch)["train/loss"]]
    before = torch.cuda.memory_allocated()
    weights = sum(p.numel() * p.element_size() for p in trainer._policy.chunks[0].parameters())
    trainer.offload()
    assert before - torch.cuda.memory_allocated() > 3 * weights  # gradients and optimizer state leave too
    trainer.onload()
    losses += [trainer.train(batch)["train/loss"] for _ in range(4)]
    trainer.save(tmp_path / "ck")
    want = [trainer.train(batch)["train/loss"] for _ in range(6)]
    assert losses[0] > losses[-1] > want[-1]
    resumed = make_trainer(folder, **sft)
    resumed.load(tmp_path / "ck")
    # A token's experts are added up in no certain order there.
    assert resumed.train(batch)["train/loss"] == pytest.approx(want[0], rel=1e-5 if kind == "qwen3" else 1e-2)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen3", torch.bfloat16), ("qwen3", torch.float32), ("glm4_moe", torch.bfloat16)]
)
def test_what_leaves_the_device_comes_back_bit_by_bit_and_leaves_nothing_behind(
    model_folder, make_trainer, make_batch, kind, dtype
):
    folder, _ = model_folder(kind, dtype=dtype)
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1)
    trainer = make_trainer(folder, algo=algo, platform=CUDA, megatron={"use_distributed_optimizer": True})
    batch = make_batch(LENGTHS, micro=3)
    trainer.train(batch)
    parts = trainer._parts
    tensors = [*parts._weights(), *parts._state()]
    want = [t.detach().cpu() for t in tensors]
    all_storages = [t.untyped_storage() for t in (*tensors, *trainer._policy.grad_buffers())]
    num_bytes = sum({storage._cdata: storage.nbytes() for storage in all_storages}.values())
    # A token's experts are added up in no certain order.
    close = {"abs": 1e-5 if kind == "qwen3" else 0.05}
    scores = trainer.score([[5, 6, 7]])[0][1:].tolist()
    torch.cuda.empty_cache()
    seen = []
    for _ in range(4):
        here = torch.cuda.memory_allocated()
        trainer.offload(("state",))
        trainer.offload(("weights",))
        away = torch.cuda.memory_allocated()
        trainer.onload(("weights",))
        assert trainer.score([[5, 6, 7]])[0][1:].tolist() == pytest.approx(scores, **close)
        trainer.onload()
        assert all(torch.equal(t.detach().cpu(), w) for t, w in zip(tensors, want, strict=True))
        seen.append((here, away))
    print(f"{kind} {dtype}: bytes here and away {seen}, device {trainer.device_memory()}")
    assert all(here - away >= num_bytes for here, away in seen)
    assert len(set(seen[1:])) == 1
    losses = [trainer.train(batch)["train/loss"] for _ in range(2)]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", torch.float32), ("glm4_moe", torch.bfloat16)])
def test_a_reference_takes_nothing_of_the_device_and_says_what_a_model_of_its_own_would(
    model_folder, make_trainer, make_batch, kind, dtype
):
    folder, _ = model_folder(kind, dtype=dtype)
    other, _ = model_folder(kind, dtype=dtype, seed=9)
    batch = make_batch(LENGTHS, micro=3)
    want = make_trainer(other, platform=CUDA).log_probs(batch)
    make_trainer(folder, platform=CUDA)
    num_bytes = torch.cuda.memory_allocated()
    trainer = make_trainer(
        folder,
        algo=AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1),
        checkpoint=CheckpointConfig(ref_load=str(other)),
        platform=CUDA,
    )
    assert torch.cuda.memory_allocated() <= num_bytes
    weights = [t.detach().cpu() for t in trainer._parts._weights()]
    trainer.log_probs(batch)
    torch.cuda.reset_peak_memory_stats()
    trainer.log_probs(batch)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with trainer._others.reference.in_place():
        got = trainer.log_probs(batch)
    block = max(t.untyped_storage().nbytes() for t in trainer._parts._weights())
    assert torch.cuda.max_memory_allocated() <= max(peak, num_bytes + min(block, SWAP_BUFFER_BYTES) + (1 << 20))
    # A token's experts are added up in no certain order.
    assert np.nanmax(np.abs(got - want)) <= (0 if kind == "qwen3" else 0.05)
    assert all(torch.equal(t.detach().cpu(), w) for t, w in zip(trainer._parts._weights(), weights, strict=True))


def test_bf16_gradients_do_not_depend_on_micro_batches(model_folder, make_trainer, make_batch):
    folder, _ = model_folder(dtype=torch.bfloat16)
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
    norms = [
        make_trainer(folder, platform=CUDA, algo=algo).train(make_batch(LENGTHS, micro=m))["train/grad_norm"]
        for m in (None, 3, 1)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=0.02)
