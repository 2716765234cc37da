"""Memory on one CUDA device: the head's bound, the optimizer on the host, and the estimate against a whole step."""

import gc

import numpy as np
import pytest
import torch

from vime.config import AlgoConfig
from vime.models import family_of
from vime.models.activations import Recompute
from vime.models.division import Division
from vime.models.memory import GIB, Training, default_chunk_size, estimate
from vime.platform import get_platform
from vime.trainer.megatron.losses.log_probs import chunked_log_probs
from vime.trainer.megatron.nn.layers import take_rows
from vime.trainer.megatron.optimizers.host_optimizer import HostOptimizer
from vime.trainer.megatron.weights import hf_io

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = get_platform("cuda")
SFT = AlgoConfig(loss_type="sft_loss")


@pytest.fixture
def wide_model(tmp_path):
    """(layers, **config) -> a random bf16 Qwen3 of Qwen3-0.6B's width."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(layers, *, dtype=torch.bfloat16, **more):
        torch.manual_seed(0)
        config = Qwen3Config(
            num_hidden_layers=layers,
            head_dim=128,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            dtype=dtype,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
            **{
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "vocab_size": 151_936,
                **more,
            },
        )
        folder = tmp_path / f"wide-{layers}-{len(list(tmp_path.iterdir()))}"
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config).to(dtype)
        model.save_pretrained(folder)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        return folder

    return make


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(151_936, 4096), (151_552, 5120), (151_936 // 8, 4096)])
def test_the_vocabulary_takes_less_than_a_gibibyte(rows, width, entropy):
    tokens = 16_384
    hidden_states = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") * 0.02)
    weight.main_grad = torch.zeros(rows, width, device="cuda")
    targets = torch.randint(rows, (tokens,), device="cuda")
    wanted = torch.arange(tokens, device="cuda")

    def run():
        hidden_states.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        log_probs, value = chunked_log_probs(
            take_rows(hidden_states, wanted),
            weight,
            targets,
            temperature=0.9,
            chunk_size=default_chunk_size(rows, 2, fused=True),
            with_entropy_grad=entropy,
            weight_is_shared=False,
        )
        (log_probs.sum() + (0.01 * value.sum() if entropy else 0.0)).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    run()  # cuBLAS takes its workspace, torch.compile its kernels
    extra = run()
    print(f"{rows} rows, hidden {width}, entropy {entropy}: {extra / GIB:.3f} GiB")
    assert extra < GIB


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_an_optimizer_on_the_host_trains_the_same_in_less_memory(
    wide_model, make_trainer, make_batch, dtype, bound, overlap
):
    folder = wide_model(2, dtype=dtype, vocab_size=32_000)
    batch = make_batch([90, 40, 170, 60], micro=2, vocab=32_000)
    seen = {}
    for fraction in (0.0, 0.4, 1.0):
        host = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "overlap_cpu_optimizer_d2h_h2d": overlap,
        }
        trainer = None  # the fixture closes it, and it leaves the device
        trainer = make_trainer(
            folder, platform=CUDA, algo=SFT, megatron={"lr": 1e-3, "clip_grad": 1.0, **(host if fraction else {})}
        )
        losses = [trainer.train(batch)["train/loss"] for _ in range(5)]
        parameters = sum(p.numel() for chunk in trainer._policy.ddps for p in chunk.parameters())
        seen[fraction] = losses, torch.cuda.memory_allocated()
    state = (8 if dtype == torch.float32 else 12) * parameters
    (want, whole), (some_losses, some), (losses, none) = (seen[f] for f in (0.0, 0.4, 1.0))
    print(f"{dtype}, overlap {overlap}: state {state / GIB:.3f} GiB, saved {(whole - none) / GIB:.3f}", losses, want)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(want, rel=bound) and some_losses == pytest.approx(want, rel=bound)
    assert whole - none == pytest.approx(state, rel=0.03)
    # Whole parameters go to the host until the share is reached; the embedding is half of all.
    assert 0.4 * state * 0.97 < whole - some < 0.65 * state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_with_its_optimizer_on_the_host_resumes_and_offloads(
    wide_model, make_trainer, make_batch, tmp_path, dtype
):
    folder = wide_model(2, dtype=dtype, vocab_size=32_000)
    batch = make_batch([90, 40, 170, 60], micro=2, vocab=32_000)
    settings = {"lr": 1e-3, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}
    trainer = make_trainer(folder, platform=CUDA, algo=SFT, megatron=settings)
    trainer.train(batch)
    trainer.save(tmp_path / "ck")
    trainer.offload()
    trainer.onload()
    want = [trainer.train(batch)["train/loss"] for _ in range(3)]
    trainer = make_trainer(folder, platform=CUDA, algo=SFT, megatron=settings)
    trainer.load(tmp_path / "ck")
    got = [trainer.train(batch)["train/loss"] for _ in range(3)]
    optimizer = trainer._policy.optimizer
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    assert isinstance(inner, HostOptimizer)
    assert {p.device.type for p in inner.cpu_copys_map_gpu_param} == {"cpu"}
    # Attention's backward on CUDA adds in any order.
    assert got == pytest.approx(want, rel=1e-4 if dtype == torch.float32 else 5e-3)


def test_recomputation_changes_nothing_but_rounding(wide_model, make_trainer, make_batch):
    folder = wide_model(2, vocab_size=32_000)
    batch = make_batch([90, 40, 170, 60], micro=2, vocab=32_000)

    def step(**recompute):
        metrics = make_trainer(folder, platform=CUDA, algo=SFT, megatron=recompute).train(batch)
        return metrics["train/loss"], metrics["train/grad_norm"]

    loss, norm = step()
    full = {"recompute_granularity": "full", "recompute_num_layers": 1}
    modules = ["core_attn"], ["layernorm"], ["mlp"], ["core_attn", "layernorm", "mlp"]
    for settings in (
        *({**full, "recompute_method": method} for method in ("uniform", "block")),
        *({"recompute_granularity": "selective", "recompute_modules": names} for names in modules),
    ):
        got_loss, got_norm = step(**settings)
        assert got_loss == pytest.approx(loss, rel=1e-5), settings
        assert got_norm == pytest.approx(norm, rel=1e-3), settings  # attention's backward adds in any order


@pytest.mark.parametrize(
    ("recompute", "name"),
    [
        ({}, "none"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}, "mlp, layernorm"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "full"),
    ],
)
def test_a_step_takes_what_is_estimated(wide_model, make_trainer, make_batch, recompute, name):
    """16 x 1,280 packed tokens of Qwen3-0.6B's shapes: torch's own peak against the estimate without the driver's."""
    folder = wide_model(28)
    batch = make_batch([1280] * 16, prompt=256, vocab=151_936)
    trainer = make_trainer(folder, platform=CUDA, megatron={"lr": 1e-6, **recompute})
    trainer.train(batch)  # kernels and optimizer state
    metrics = trainer.train(batch)
    assert np.isfinite(metrics["train/loss"])
    measured = metrics["memory/trainer_device_peak_bytes"]
    hf = hf_io.read_config(folder)
    kind = {key.removeprefix("recompute_"): value for key, value in recompute.items()}
    want = estimate(family_of(hf).settings(hf), Division(), Training(tokens=20_480, recompute=Recompute(**kind)))[0]
    estimated = want.total - want.parts["driver, NCCL, allocator"]
    print(f"recompute {name}: measured {measured / GIB:.2f} GiB, estimated {estimated / GIB:.2f} GiB, {want.moments}")
    assert estimated == pytest.approx(measured, rel=0.15)
