"""Time, arithmetic and memory of an optimizer step on one CUDA device, without engines.

    python benchmarks/train_step.py scripts/models/qwen3-0.6b/config.json
    python benchmarks/train_step.py scripts/models/qwen3-30b-a3b/config.json --num-layers 6

A model of the shape that an HF config.json says with random bf16 weights takes optimizer steps with the policy
loss on packed sequences of equal length, the first steps left out; beside it the forward pass alone. MFU is measured
against an 8192^3 bf16 matrix product of the same run. Operations: vime/models/flops.py, three forward passes' worth a
step, recomputation not counted. Prints a line of JSON, and appends it to the file --out. With --profile, a further step
is traced, and a table of its kernels and operators by their time on the device is written. Needs no vLLM and no Ray.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import say, write_checkpoint  # noqa: E402
from vime.config import Config, RolloutConfig, TrainConfig  # noqa: E402
from vime.models import family_of  # noqa: E402
from vime.models.flops import forward_flops  # noqa: E402
from vime.platform import get_platform  # noqa: E402
from vime.types import TrainBatch  # noqa: E402

WARM_UP_STEPS, STEPS = 3, 5
GIB = 1 << 30


def seconds(work: Callable[[], object]) -> float:
    """Wall time of some work on the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_tflops() -> float:
    """What the device does at most: the best of twenty 8192^3 bf16 products, in TFLOP/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = min(seconds(lambda: a @ b) for _ in range(20))
    return 2 * 8192**3 / best / 1e12


def sustained_matmul_tflops(for_s: float = 4.0) -> float:
    """The same products back to back, in the second half of some seconds: as fast as the power limit lets them be."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def some() -> None:
        for _ in range(20):
            a @ b

    begin, times = time.perf_counter(), []
    while (past := time.perf_counter() - begin) < for_s:
        times.append((past, seconds(some)))
    return 2 * 8192**3 * 20 / statistics.median(took for past, took in times if past > for_s / 2) / 1e12


def batch_of(samples: int, length: int, prompt: int, micro_batch_size: int, vocab_size: int) -> TrainBatch:
    """`samples` sequences of `length` random tokens; those after the prompt are trained on."""
    g = np.random.default_rng(0)
    cu = np.arange(samples + 1) * length
    mask = np.tile(np.arange(length) >= prompt, samples)
    plan = tuple(tuple(range(i, i + micro_batch_size)) for i in range(0, samples, micro_batch_size))
    return TrainBatch(
        rollout_id=0,
        tokens=g.integers(0, vocab_size, cu[-1]).astype(np.int32),
        cu_seqlens=cu,
        loss_mask=mask.astype(np.uint8),
        rollout_log_probs=np.where(mask, -10.0, np.nan).astype(np.float32),
        loss_weights=(mask / mask.sum()).astype(np.float32),
        advantages=g.standard_normal(samples).astype(np.float32),
        rewards=np.zeros(samples, np.float32),
        group_ids=np.arange(samples),
        trajectory_ids=np.arange(samples),
        steps=((plan,),),
        global_batch_size=samples,
        truncated=np.zeros(samples, dtype=np.bool_),
    )


def write_profile(path: Path, work: Callable[[], object]) -> None:
    """A table of what some work does on the device and the host, the longest on the device first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        wall = seconds(work)
    table = trace.key_averages().table(sort_by="self_device_time_total", row_limit=80, max_name_column_width=110)
    path.write_text(f"{wall:.4f} s of wall time, the tracing included\n{table}\n", encoding="utf-8")


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one shape and setting."""
    from vime.trainer.megatron.trainer import MegatronTrainer

    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    if arguments.num_layers:
        config["num_hidden_layers"] = arguments.num_layers
    parameters = write_checkpoint(folder / "model", config)
    ceiling = matmul_tflops()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    megatron = {"lr": 1e-6, "bf16": True, **json.loads(arguments.megatron)}
    trainer = MegatronTrainer(
        Config(megatron=megatron, rollout=RolloutConfig(rollout_temperature=1.0), train=TrainConfig()),
        hf_path=str(folder / "model"),
        platform=get_platform("cuda"),
        rank=0,
        world_size=1,
        init_method=f"file://{folder / 'rendezvous'}",
        total_steps=100,
        writer=None,
    )
    model = family_of(config).settings(config)
    batch = batch_of(
        arguments.samples, arguments.length, arguments.prompt, arguments.micro_batch_size, model.vocab_size
    )
    metrics: list[dict[str, float]] = []
    steps = [seconds(lambda: metrics.append(trainer.train(batch))) for _ in range(WARM_UP_STEPS + arguments.steps)]
    steps = steps[WARM_UP_STEPS:]
    if arguments.profile:
        write_profile(arguments.profile, lambda: trainer.train(batch))
    forwards = [seconds(lambda: trainer.log_probs(batch)) for _ in range(2 + STEPS)][2:]
    trainer.close()
    sustained = sustained_matmul_tflops()
    step, forward = statistics.median(steps), statistics.median(forwards)
    flops = forward_flops(model, [arguments.length] * arguments.samples, int(batch.loss_mask.sum()))
    return {
        "model": arguments.config.parent.name,
        "num_layers": config["num_hidden_layers"],
        "parameters": parameters,
        "samples": arguments.samples,
        "length": arguments.length,
        "micro_batch_size": arguments.micro_batch_size,
        "megatron": megatron,
        "step_s": step,
        "step_s_all": steps,
        "forward_s": forward,
        "tokens_per_s": len(batch.tokens) / step,
        "tflops": 3 * flops / step / 1e12,
        "matmul_tflops": ceiling,
        "matmul_sustained_tflops": sustained,
        "mfu": 3 * flops / step / 1e12 / ceiling,
        "peak_gib": max(m["memory/trainer_device_peak_bytes"] for m in metrics) / GIB,
        "loss": [m["train/loss"] for m in metrics],
        "grad_norm": [m["train/grad_norm"] for m in metrics],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an HF config.json")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=1280, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="of these, not trained on (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed (default: %(default)s)")
    parser.add_argument("--megatron", default="{}", help="Megatron settings by field name, as JSON")
    parser.add_argument("--profile", type=Path, help="write a table of one step's kernels and operators to this file")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    say(result, arguments.out)


if __name__ == "__main__":
    main()
