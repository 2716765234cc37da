"""Ranks that divide the work in any proven way do what one process does.

The processes are started once and run a table of cases one after the other; each test looks at one case.
"""

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
from tests.trainer.conftest import make_batch_of, write_model
from vime.config import AlgoConfig, RolloutConfig, TrainConfig
from vime.config.parallel import parallel_sizes

pytestmark = pytest.mark.ranks
LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]
RL = {"use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coef": 0.01}
SFT = {"loss_type": "sft_loss"}
OWN = {"loss_type": "custom_loss", "custom_loss_function_path": "tests.trainer.megatron.hooks.same_loss", **RL}
NOT_OF_OWN = ("train/pg_clipfrac",)
TP, PP, CP = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "pipeline_model", "context"))
SP = {**TP, "sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 3000}
BF16 = {"bf16": True}
MODELS = {
    "qwen3-tied": {"kind": "qwen3", "tied": True},
    "qwen3-untied": {"kind": "qwen3", "tied": False},
    "llama-tied": {"kind": "llama", "tied": True},
    "llama-untied": {"kind": "llama", "tied": False},
}


def case(name, model, megatron=None, algo=RL, **more):
    return {"name": name, "model": model, "megatron": megatron or {}, "algo": algo, **more}


TWO = [
    case("dp", "qwen3-tied", breaks=1),
    case("tp", "qwen3-tied", TP, breaks=1),
    case("tp-sp", "qwen3-tied", SP, breaks=0, exports=True, saves=True),
    case("pp", "qwen3-tied", PP, breaks=0, exports=True, saves=True),
    case("cp", "qwen3-tied", CP, breaks=1),
    case("tp-llama", "llama-untied", TP),
    case("tp-sp-llama", "llama-untied", {**SP, "use_distributed_optimizer": False}),
    case("pp-llama", "llama-untied", {**PP, "deallocate_pipeline_outputs": True}),
    case("cp-llama", "llama-untied", CP),
    case("tp-sp-sft", "llama-tied", SP, SFT),
    case("pp-sft", "llama-tied", PP, SFT),
    case("cp-sft", "llama-tied", CP, SFT),
    case("pp-untied", "qwen3-untied", PP),
    case("pp-own-loss", "qwen3-tied", PP, OWN),
    case("cp-own-loss", "qwen3-tied", CP, OWN),
    case("tp-empty-part", "qwen3-untied", {**TP, "make_vocab_size_divisible_by": 64}),
    case("dp-overlap", "qwen3-tied", OVERLAP, saves=True),
    case("pp-overlap", "qwen3-tied", {**PP, **OVERLAP}),
    case("tp-sp-recompute", "llama-untied", {**SP, **RECOMPUTE}),
    case("pp-recompute", "llama-untied", {**PP, **RECOMPUTE}),
    case("cp-recompute", "llama-untied", {**CP, **RECOMPUTE}),
    # Checkpoints: saved after the first rollout by one layout, gone on with by the same and by others.
    case("tp-sp-again", "qwen3-tied", SP, load="tp-sp"),
    case("pp-again", "qwen3-tied", PP, load="pp"),
    case("pp-from-tp", "qwen3-tied", PP, load="tp-sp"),
    case("cp-from-pp", "qwen3-tied", CP, load="pp"),
    case("dp-from-tp", "qwen3-tied", load="tp-sp"),
    case("tp-from-dp", "qwen3-tied", TP, load="dp-overlap"),
    case("tp-from-pp", "qwen3-tied", TP, load="pp"),
]
HALF = [
    case("tp-sp-bf16", "qwen3-tied", {**SP, **BF16}),
    case("pp-bf16", "qwen3-tied", {**PP, **BF16}),
    case("cp-bf16", "qwen3-tied", {**CP, **BF16}),
]
FOUR = [
    case("tp-pp", "qwen3-tied", {**SP, **PP}, breaks=1, saves=True),
    case("tp-cp", "qwen3-tied", {**SP, **CP}, breaks=2),
    case("dp-tp", "qwen3-tied", TP, breaks=3),
    case("dp-tp-from-tp-pp", "qwen3-tied", TP, load="tp-pp"),
    case("pp-cp-from-tp-pp", "qwen3-tied", {**PP, **CP}, load="tp-pp"),
]


def batches_for(megatron, world_size):
    """Three rollouts: one step, two steps (old log-probs), and one that leaves a rank without samples."""
    dp = parallel_sizes(megatron).data(world_size)
    three = make_batch_of([5, 6, 7], seed=2)
    if dp == 2:
        three = replace(three, steps=((((0,), (2,)), ((1,), ())),))
    batches = [make_batch_of(LENGTHS, dp=dp, micro=3), make_batch_of(LENGTHS, dp=dp, micro=1, steps=2, seed=1), three]
    for batch in batches:
        batch.advantages[:] += 1  # a loss that is not what two larger numbers leave of each other
    return batches


def start_ranks(folder, world_size, cases, platform):
    """Start the processes; they run the cases one after the other."""
    cases = [{**c, "platform": platform, "batches": batches_for(c["megatron"], world_size)} for c in cases]
    file = f"cases-{world_size}.pkl"
    (folder / file).write_bytes(pickle.dumps(cases))
    path = os.pathsep.join([str(Path(vime.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    worker = str(Path(__file__).with_name("rank_worker.py"))
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", worker, str(rank), str(world_size), str(folder), file],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def results_of(folder, processes):
    """Case -> [what each rank gave]."""
    texts = []
    for process in processes:
        text, _ = process.communicate(timeout=500)
        texts.append(text)
        assert process.returncode == 0, text
    print(texts[0])
    files = [folder / f"result-{len(processes)}-{rank}.pkl" for rank in range(len(processes))]
    ranks = [pickle.loads(file.read_bytes()) for file in files]
    return {name: [r.get(name, {"failed": "did not come to this case"}) for r in ranks] for name in ranks[0]}


def one_process_cases(cases):
    """One reference for each model and loss among the cases."""
    pairs = {(c["model"], c["algo"] is SFT) for c in cases}
    return [case(f"{model}{'-sft' if sft else ''}", model, algo=SFT if sft else RL) for model, sft in sorted(pairs)]


def run_cases(folder, world_size, cases, platform="cpu"):
    """(results by case, results of one process, folder)."""
    for seed, (name, what) in enumerate(MODELS.items()):
        write_model(folder / name, seed=seed, **what)
    several = start_ranks(folder, world_size, cases, platform)
    one = start_ranks(folder, 1, one_process_cases(cases), platform)
    try:
        return results_of(folder, several), results_of(folder, one), folder
    finally:
        for process in (*several, *one):
            process.kill()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("ranks"), 2, TWO + HALF)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("ranks"), 4, FOUR)


def assert_same_metrics(got, want, *, rtol=1e-5, without=()):
    for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for name in theirs:
            if name.startswith("train/") and name not in without:
                # A mean difference of two log-probs keeps only what float32 leaves of each.
                tolerance = rtol / 10 if name in ("train/ppo_kl", "train/kl_loss") or "diff" in name else 1e-8
                assert ours[name] == pytest.approx(theirs[name], rel=rtol, abs=tolerance), (name, k)


def assert_like_one_process(c, ranks, one, folder, *, rtol=1e-5):
    reference = one[f"{c['model']}{'-sft' if c['algo'] is SFT else ''}"][0]
    for rank in ranks:
        assert "failed" not in rank, rank.get("failed")
    if "load" in c:
        for rank in ranks:
            assert_same_metrics(rank["metrics"], reference["metrics"][1:], rtol=rtol)
        return
    for rank in ranks:
        np.testing.assert_allclose(rank["log_probs"], reference["log_probs"], rtol=rtol, atol=rtol / 10)
        for got, want in zip(rank["scores"], reference["scores"], strict=True):
            np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol / 10)
        assert_same_metrics(
            rank["metrics"], reference["metrics"], rtol=rtol, without=NOT_OF_OWN if c["algo"] is OWN else ()
        )
        if c["algo"] is OWN:
            for got, want in zip(rank["metrics"], reference["metrics"], strict=True):
                assert got["custom/clipped"] == pytest.approx(want["train/pg_clipfrac"], rel=rtol)
    # Weights reach rank 0 alone: what it loaded, bit for bit, and after training what one process has.
    source = load_file(folder / c["model"] / "model.safetensors")
    first = dict(ranks[0]["first"])
    assert [name for name, _ in ranks[0]["first"]] == [name for name, _ in reference["first"]]
    assert first.keys() == source.keys() and all(torch.equal(first[name], source[name]) for name in source)
    for (name, got), (_, want) in zip(ranks[0]["last"], reference["last"], strict=True):
        torch.testing.assert_close(got, want, atol=rtol, rtol=rtol, msg=name)
    assert len(ranks[0]["buckets"]) > 2 and all(count > 0 for count in ranks[0]["buckets"])
    assert all(rank["buckets"] == [None] * len(ranks[0]["buckets"]) for rank in ranks[1:])
    if c.get("exports"):
        exported = load_file(folder / f"out-{c['name']}" / "model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in ranks[0]["last"])


def assert_all_name_the_broken_rank(c, ranks):
    """The rank whose gradient is broken; the loss breaks on all ranks that compute the spoilt sample's."""
    for rank in ranks:
        of_gradient, of_loss = rank["errors"]
        assert f"the gradient is not finite on rank {c['breaks']} (" in of_gradient, of_gradient
        assert ", rollout 7, step 4" in of_gradient and "the loss is not finite on rank " in of_loss
        assert rank["errors"] == ranks[0]["errors"]


@pytest.mark.parametrize("c", TWO, ids=[c["name"] for c in TWO])
def test_two_ranks_train_like_one_process(two_ranks, c):
    several, one, folder = two_ranks
    assert_like_one_process(c, several[c["name"]], one, folder)


@pytest.mark.parametrize("saved", ["tp-sp", "pp"])
def test_the_same_layout_goes_on_bit_by_bit(two_ranks, saved):
    several, _, _ = two_ranks
    for straight, resumed in zip(several[saved], several[f"{saved}-again"], strict=True):
        assert straight["random"] == resumed["random"]
        for want, got in zip(straight["metrics"][1:], resumed["metrics"], strict=True):
            assert {n: v for n, v in got.items() if n.startswith("train/")} == {
                n: v for n, v in want.items() if n.startswith("train/")
            }


@pytest.mark.parametrize(
    ("name", "differ"), [("dp", ()), ("cp", ()), ("tp", ("own",)), ("tp-sp", ("own",)), ("pp", ("own", "shared"))]
)
def test_random_streams_differ_where_ranks_hold_different_tensors(two_ranks, name, differ):
    first, second = (rank["random"] for rank in two_ranks[0][name])
    assert {stream for stream in first if first[stream] != second[stream]} == set(differ)


@pytest.mark.parametrize("c", HALF, ids=[c["name"] for c in HALF])
def test_bf16_on_two_ranks_stays_close_to_float32_in_one_process(two_ranks, c):
    several, one, _ = two_ranks
    reference = one[c["model"]][0]
    for rank in several[c["name"]]:
        assert "failed" not in rank, rank.get("failed")
        assert np.nanmean(np.abs(rank["log_probs"] - reference["log_probs"])) < 0.05
        for got, want in zip(rank["metrics"], reference["metrics"], strict=True):
            assert got["train/entropy_loss"] == pytest.approx(want["train/entropy_loss"], rel=0.05)
            assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.2)


@pytest.mark.parametrize("saved", ["tp-sp", "pp", "dp-overlap"])
def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(two_ranks, make_trainer, saved):
    _, one, folder = two_ranks
    trainer = make_trainer(
        folder / "qwen3-tied",
        algo=AlgoConfig(**RL),
        rollout=RolloutConfig(rollout_temperature=0.8),
        train=TrainConfig(lr_decay_style="cosine", lr_decay_iters=10),
        total_steps=10,
        megatron={"lr": 1e-2, "adam_eps": 1e-2},
    )
    trainer.load(folder / f"ck-{saved}")
    got = [trainer.train(batch) for batch in batches_for({}, 1)[1:]]
    assert_same_metrics(got, one["qwen3-tied"][0]["metrics"][1:])


@pytest.mark.parametrize("c", [c for c in TWO if "breaks" in c], ids=lambda c: c["name"])
def test_a_broken_gradient_names_its_rank_and_stops_both(two_ranks, c):
    assert_all_name_the_broken_rank(c, two_ranks[0][c["name"]])


@pytest.mark.slow
@pytest.mark.parametrize("c", FOUR, ids=[c["name"] for c in FOUR])
def test_four_ranks_train_like_one_process(four_ranks, c):
    several, one, folder = four_ranks
    assert_like_one_process(c, several[c["name"]], one, folder)
    if "breaks" in c:
        assert_all_name_the_broken_rank(c, several[c["name"]])
