"""What R3 is worth: a mixture of experts trained by GRPO with and without it, the same seeds, a dense model beside.

    python -m benchmarks.agreement.experiment --out runs/r3 [--seeds 0 1 2] [--devices 0 1] [--stage warm|grpo|judge]

Makes a model of 208M parameters, 32 experts of which 4 see a token, and a dense one of like size; trains both by
supervision for some minutes, so that the router is not random; then runs GRPO on reasoning-gym's chain_sum from there,
each run on one of the devices, as many side by side as there are. Runs that are complete are not repeated, so that the
stages may be commands of their own. The last stage judges the differences of trainer and engine as
`python -m benchmarks.agreement --without … --with … --dense …` does; exit code 0 if R3 lowers them as wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.agreement.sums import write_problems  # noqa: E402

SHAPES = {
    "moe": [
        *("--family", "qwen3_moe", "--num-experts", "32", "--experts-per-token", "4", "--expert-ffn-size", "512"),
    ],
    "dense": ["--family", "qwen3", "--ffn-size", "16384"],
}
_SHARED_SHAPE = "--hidden-size 512 --num-layers 8 --num-heads 8 --num-kv-heads 4 --head-size 64 --dtype bfloat16"
_TRAINER = (
    "--bf16 --input-key problem --rollout-shuffle --use-dynamic-batch-size --max-tokens-per-gpu 32768 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --clip-grad 1.0 --actor-num-nodes 1 --actor-num-gpus-per-node 1"
)
_WARM = (
    "--loss-type sft_loss --rollout-function-path vime.rollout.sft_rollout.generate_rollout --label-key solution "
    "--rollout-batch-size 512 --lr 5e-4 --lr-warmup-iters 20 --no-save-rollouts"
)
_GRPO = (
    "--colocate --label-key sum --custom-rm-path benchmarks.agreement.sums.last_number_reward --advantage-estimator "
    "grpo --eps-clip-high 0.28 --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-response-len 40 "
    "--rollout-max-context-len 96 --lr 1e-5 --lr-warmup-iters 3 --vllm-enforce-eager true "
    "--vllm-gpu-memory-utilization 0.2 --vllm-kv-cache-memory-bytes 4000000000 --eval-interval 20 --eval-temperature 0 "
    "--no-save-rollouts"
)


def train(
    name: str,
    flags: Sequence[str],
    out: Path,
    device: str,
    *,
    steps: int,
    limit_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Run train.py on one device. Returns: whether the run is complete, this time or an earlier one.

    Args: flags: all but --num-rollout and --run-dir. environment: added to this process's.
    """
    folder = out / name
    if done(folder) >= steps:
        return True
    command = [sys.executable, "train.py", *flags, "--num-rollout", str(steps)]
    devices = {"CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    begin = time.monotonic()
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        try:
            code: int | str = subprocess.run(
                [*command, "--run-dir", str(folder)],
                cwd=ROOT,
                env={**os.environ, **devices, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {limit_s:.0f} s"
    print(f"experiment: {name}: {done(folder)} steps, exit code {code}, {time.monotonic() - begin:.0f} s", flush=True)
    return done(folder) >= steps


def done(folder: Path) -> int:
    """Training steps that a run has made."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sum("train/step" in json.loads(line) for line in lines if line.endswith("}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--devices", nargs="+", default=["0"], help="CUDA devices; runs are shared out among them")
    parser.add_argument("--at-a-time", type=int, default=1, help="GRPO runs of a device side by side")
    parser.add_argument("--stage", choices=["warm", "grpo", "judge"], help="only this one; default: all")
    parser.add_argument("--warm-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that a run may take")
    given = parser.parse_args()
    out = given.out.resolve()
    data, heldout = write_problems(out / "data", num_train=40_000, num_heldout=200)
    complete = True
    if given.stage in (None, "warm"):
        complete &= warm(out, data, given.devices, given.warm_steps, given.limit)
    names = run_names(given.seeds)
    if given.stage in (None, "grpo") and complete:
        slots = [device for _ in range(given.at_a_time) for device in given.devices]
        files = ["--prompt-data", str(data), "--eval-prompt-data", "heldout", str(heldout)]
        flags = [*_TRAINER.split(), *_GRPO.split(), *files]

        def one(number: int) -> bool:
            name, model, own = names[number]
            own = [*flags, "--hf-checkpoint", str(out / f"{model}_warm"), *own]
            return train(name, own, out, slots[number % len(slots)], steps=given.steps, limit_s=given.limit)

        with ThreadPoolExecutor(len(slots)) as pool:
            complete &= all(list(pool.map(one, range(len(names)))))
    if given.stage not in (None, "judge"):
        return 0 if complete else 1
    folders = {kind: [str(out / f"{kind}_{seed}") for seed in given.seeds] for kind in ("without", "with", "dense")}
    flags = [word for kind, those in folders.items() for word in (f"--{kind}", *those)]
    return subprocess.run([sys.executable, "-m", "benchmarks.agreement", *flags], cwd=ROOT).returncode


def warm(out: Path, data: Path, devices: Sequence[str], steps: int, limit_s: float) -> bool:
    """Make both models and train them by supervision, side by side. Returns: whether both are there."""

    def one(number: int) -> bool:
        model = list(SHAPES)[number]
        folder = out / model
        if not folder.exists():
            shape = [*SHAPES[model], *_SHARED_SHAPE.split()]
            subprocess.run(
                [sys.executable, "-m", "vime.cli.main", "init-model", str(folder), *shape], cwd=ROOT, check=True
            )
        flags = [*_TRAINER.split(), *_WARM.split(), "--hf-checkpoint", str(folder), "--prompt-data", str(data)]
        flags += ["--save-hf", str(out / f"{model}_warm")]
        device = devices[number % len(devices)]
        return train(f"{model}_warmup", flags, out, device, steps=steps, limit_s=limit_s)

    with ThreadPoolExecutor(len(SHAPES)) as pool:
        return all(list(pool.map(one, range(len(SHAPES)))))


def run_names(seeds: Sequence[int]) -> list[tuple[str, str, list[str]]]:
    """Name, model and flags of each GRPO run."""
    runs = []
    for seed in seeds:
        seeded = ["--seed", str(seed), "--rollout-seed", str(seed)]
        runs.append((f"without_{seed}", "moe", seeded))
        runs.append((f"with_{seed}", "moe", [*seeded, "--use-rollout-routing-replay"]))
        runs.append((f"dense_{seed}", "dense", seeded))
    return runs


if __name__ == "__main__":
    sys.exit(main())
