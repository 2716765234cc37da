"""Tiny random models written by transformers, batches, and a trainer that is closed after each test."""

import gc

import numpy as np
import pytest
import torch

from tests.families import write_family
from vime.config import Config
from vime.platform import get_platform
from vime.types import TrainBatch

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CPU = get_platform("cpu")


def write_model(folder, kind, *, tied=True, dtype=torch.float32, seed=0, layers=SMALL["num_hidden_layers"]):
    """A random checkpoint of a kind in tests/families.py; returns the model. GLM's head is never tied."""
    width = {} if kind in ("llama", "qwen2", "qwen2-yarn") else {"head_dim": 32}
    sizes = {**SMALL, **width, "num_hidden_layers": layers}
    return write_family(folder, kind, sizes, tied=tied and not kind.startswith("glm"), dtype=dtype, seed=seed)


@pytest.fixture
def model_folder(tmp_path):
    """(kind, tied, dtype) -> (folder, the transformers model)."""

    def make(kind="qwen3", **kwargs):
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        return folder, write_model(folder, kind, **kwargs)

    return make


@pytest.fixture
def make_trainer(tmp_path):
    """(folder, writer=None, **Config sections) -> MegatronTrainer; one at a time, the last is closed at the end."""
    from vime.trainer.megatron.trainer import MegatronTrainer

    alive = []

    def make(folder, *, writer=None, total_steps=100, megatron=(), platform=CPU, **sections):
        while alive:
            alive.pop().close()
            if platform is not CPU:
                gc.collect()  # tests of the device's memory measure one trainer
        config = Config(megatron={"lr": 1e-3, **dict(megatron)}, **sections)
        rendezvous = tmp_path / f"rendezvous-{len(list(tmp_path.iterdir()))}"
        trainer = MegatronTrainer(
            config,
            hf_path=str(folder),
            platform=platform,
            rank=0,
            world_size=1,
            init_method=f"file://{rendezvous}",
            total_steps=total_steps,
            writer=writer,
        )
        alive.append(trainer)
        return trainer

    yield make
    while alive:
        alive.pop().close()
    gc.collect()  # a process group's threads end with it


def make_batch_of(
    lengths, *, prompt=3, micro=None, steps=1, dp=1, seed=0, rollout_log_probs=None, vocab=SMALL["vocab_size"]
):
    """A random batch: one trajectory per sample, token mean inside each, averaged over each step's samples.

    micro: samples in a micro-batch; None puts a rank's whole share into one.
    """
    g = np.random.default_rng(seed)
    n, lengths = len(lengths), np.asarray(lengths)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    mask = (within >= prompt).astype(np.uint8)
    per_step = n // steps
    weights = (mask / np.repeat(np.maximum(lengths - prompt, 1), lengths) / per_step).astype(np.float32)
    plan = []
    for k in range(steps):
        ranks = [range(k * per_step + r, (k + 1) * per_step, dp) for r in range(dp)]
        size = micro or per_step
        plan.append(tuple(tuple(tuple(r[a : a + size]) for a in range(0, len(r), size)) for r in ranks))
    sampled = np.full(cu[-1], -4.0) if rollout_log_probs is None else rollout_log_probs
    return TrainBatch(
        rollout_id=7,
        tokens=g.integers(0, vocab, cu[-1]).astype(np.int32),
        cu_seqlens=cu,
        loss_mask=mask,
        rollout_log_probs=np.where(mask, sampled, np.nan).astype(np.float32),
        loss_weights=weights,
        advantages=g.standard_normal(n).astype(np.float32),
        rewards=np.zeros(n, np.float32),
        group_ids=np.arange(n),
        trajectory_ids=np.arange(n),
        steps=tuple(plan),
        global_batch_size=per_step,
        truncated=np.zeros(n, dtype=np.bool_),
    )


@pytest.fixture
def make_batch():
    """See `make_batch_of`."""
    return make_batch_of


@pytest.fixture
def hf_log_probs():
    """(transformers model, batch, temperature) -> [T] log-probs, NaN first in each sample."""

    def compute(model, batch, temperature=1.0):
        out = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        for i in range(batch.num_samples):
            rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
            ids = torch.from_numpy(batch.tokens[rows].astype(np.int64))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, :-1].float() / temperature
            picked = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
            out[rows][1:] = picked.numpy()
        return out

    return compute
