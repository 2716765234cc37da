"""The compiled trainer on one CUDA device: the plain one's numbers, compiled once, and no growth of memory."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from vime.config import AlgoConfig
from vime.platform import get_platform
from vime.trainer.megatron.nn import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = get_platform("cuda")
KINDS = pytest.mark.parametrize("kind", ["qwen3", "glm4_moe", "qwen3_moe"])
ALGO = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()


def other_lengths(seed):
    return np.random.default_rng(seed).integers(4, 40, 6 + seed % 3).tolist()


@KINDS
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_compiled_steps_are_those_of_operators(model_folder, make_trainer, make_batch, monkeypatch, kind, dtype, bound):
    folder, _ = model_folder(kind, dtype=dtype)
    batch = make_batch(other_lengths(0), micro=3)
    results = []
    for works in (True, False):
        monkeypatch.setattr(compiled, "compiler_works", lambda works=works: works)
        trainer = make_trainer(folder, platform=CUDA, algo=ALGO)
        log_probs, metrics = trainer.log_probs(batch), trainer.train(batch)
        results.append((log_probs, metrics["train/loss"], metrics["train/grad_norm"]))
    (got, loss, norm), (want, plain_loss, plain_norm) = results
    assert np.nanmax(np.abs(got - want)) < (1e-4 if dtype == torch.float32 else 0.1)
    assert loss == pytest.approx(plain_loss, abs=bound) and norm == pytest.approx(plain_norm, rel=bound)


@KINDS
def test_nothing_is_compiled_after_the_second_step(model_folder, make_trainer, make_batch, kind):
    folder, _ = model_folder(kind, dtype=torch.bfloat16)
    trainer = make_trainer(folder, platform=CUDA, algo=ALGO)
    seen = []
    for seed in range(8):
        batch = make_batch(other_lengths(seed), micro=2 + seed % 2, seed=seed)
        trainer.train(batch)
        trainer.log_probs(batch)
        seen.append(counters["stats"]["unique_graphs"])
    print(f"{kind}: graphs after each step {seen}")
    assert seen[0] > 0 and len(set(seen[1:])) == 1


@KINDS
def test_memory_does_not_grow_over_twenty_steps(model_folder, make_trainer, make_batch, kind):
    folder, _ = model_folder(kind, dtype=torch.bfloat16)
    trainer = make_trainer(folder, platform=CUDA, algo=ALGO)
    batches = [make_batch(other_lengths(seed), micro=3, seed=seed) for seed in range(3)]
    used = []
    for step in range(20):
        trainer.train(batches[step % 3])
        used.append(torch.cuda.memory_allocated())
    print(f"{kind}: bytes after each step {used}")
    assert used[5] == used[8] == used[11] == used[14] == used[17]
