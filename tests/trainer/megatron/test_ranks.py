"""Two real gloo ranks do what one process does."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vime
from vime.config import AlgoConfig, RolloutConfig

pytestmark = pytest.mark.ranks
LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]
KL = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.05)
WARM = RolloutConfig(rollout_temperature=0.8)


def run_two_ranks(folder):
    env = {**os.environ, "PYTHONPATH": str(Path(vime.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("rank_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(worker), str(rank), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
    return [pickle.loads((folder / f"result-{rank}.pkl").read_bytes()) for rank in range(2)]


@pytest.fixture
def both(model_folder, make_trainer, make_batch, tmp_path):
    """(results of two ranks, results of one process, folder)."""
    folder, _ = model_folder("qwen3", tied=True)
    folder.rename(tmp_path / "model")
    split = [make_batch(LENGTHS, dp=2, micro=3), make_batch(LENGTHS, dp=2, micro=1, steps=2, seed=1)]
    # Three samples on two ranks: the last micro-batch of rank 1 is empty.
    split.append(replace(make_batch([5, 6, 7], seed=2), steps=((((0,), (2,)), ((1,), ())),)))
    (tmp_path / "batches.pkl").write_bytes(pickle.dumps(split))
    two = run_two_ranks(tmp_path)
    whole = [make_batch(LENGTHS), make_batch(LENGTHS, steps=2, seed=1), make_batch([5, 6, 7], seed=2)]
    trainer = make_trainer(
        tmp_path / "model", algo=KL, rollout=WARM, total_steps=10, megatron={"lr": 1e-2, "adam_eps": 1e-2}
    )
    one = {"log_probs": trainer.log_probs(whole[0]), "metrics": [trainer.train(batch) for batch in whole]}
    trainer.export_hf(tmp_path / "one")
    return two, one, tmp_path, whole


def test_two_ranks_train_like_one_process(both, make_trainer):
    two, one, folder, whole = both
    for result in two:
        np.testing.assert_allclose(result["log_probs"], one["log_probs"], atol=1e-6)
        for got, want in zip(result["metrics"], one["metrics"], strict=True):
            for name in want:
                if not name.startswith("perf/"):
                    # A mean difference of two log-probs keeps only what float32 leaves of each.
                    tolerance = 1e-6 if name in ("train/ppo_kl", "train/kl_loss") or "diff" in name else 1e-8
                    assert got[name] == pytest.approx(want[name], rel=1e-5, abs=tolerance), name
    got, want = load_file(folder / "out" / "model.safetensors"), load_file(folder / "one" / "model.safetensors")
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-5, msg=name)

    # Only rank 0 writes; both name the rank whose loss broke.
    assert all(count > 0 for count in two[0]["buckets"]) and set(two[1]["buckets"]) == {None}
    assert len(two[0]["buckets"]) == len(two[1]["buckets"])
    assert all("data-parallel rank 1, rollout 7, step 5" in result["error"] for result in two)

    # A checkpoint of two ranks goes on in one process.
    trainer = make_trainer(
        folder / "model", algo=KL, rollout=WARM, total_steps=10, megatron={"lr": 1e-2, "adam_eps": 1e-2}
    )
    trainer.load(folder / "ck")
    after = trainer.train(whole[0])
    for name in ("train/loss", "train/grad_norm", "train/kl_loss", "train/step"):
        assert after[name] == pytest.approx(two[0]["after"][name], rel=1e-5), name
