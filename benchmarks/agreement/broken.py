"""What broken setups look like, and whether `vime mismatch` names each: real runs on engines with something wrong.

    python -m benchmarks.agreement.broken --cpu [--out runs/broken]                 # a tiny model in float32
    python -m benchmarks.agreement.broken --cuda --model MODEL [--out runs/broken]  # in bf16, on one device

Four runs of three GRPO steps at temperature 0.8, all with the same prompts again in each step: one as it should be; one
whose engine gives log-probs before the temperature is applied (raw); one whose engine is always one weight sync late;
one whose engine keeps its prefix cache when weights come. Weight probes, which would end the last two, are off. Exit
code 0: the engine of each run is judged as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.agreement.broken_engine import BREAK_VARIABLE  # noqa: E402
from benchmarks.agreement.experiment import done, train  # noqa: E402
from benchmarks.agreement.runs import read_differences  # noqa: E402
from vime.engine.vllm.processes import SERVER_VARIABLE  # noqa: E402
from vime.protocols import RolloutContext  # noqa: E402
from vime.types import Sample  # noqa: E402

VERDICTS = {"healthy": "precision", "raw": "temperature", "late": "stale weights", "cache": "stale cache"}
"""Run -> what `vime mismatch` is to say of its engine."""
_STEPS, _STEP = 3, 1
"""Trained on, and compared: the first step whose weights are not those that the run began with."""
_PROMPTS = 32
_FLAGS = (
    "--input-key prompt --custom-rm-path benchmarks.agreement.broken.share_of_vowels --advantage-estimator grpo "
    f"--rollout-batch-size {_PROMPTS} --n-samples-per-prompt 4 --rollout-temperature 0.8 --rollout-max-response-len 32 "
    "--rollout-max-context-len 256 --use-dynamic-batch-size --lr-warmup-iters 0 --lr-decay-style constant "
    "--weight-probe-interval 0 --save-hf-interval 1"
)
_DEVICE_FLAGS = {
    "cpu": "--platform cpu --lr 1e-3 --max-tokens-per-gpu 2048 --vllm-block-size 32",
    "cuda": "--platform cuda --bf16 --colocate --no-offload-train --no-offload-rollout --lr 1e-4 --max-tokens-per-gpu "
    "16384 --vllm-enforce-eager true --vllm-gpu-memory-utilization 0.2 --vllm-kv-cache-memory-bytes 4000000000 "
    "--vllm-block-size 16 --actor-num-nodes 1 --actor-num-gpus-per-node 1",
}


async def share_of_vowels(config: RolloutContext, sample: Sample) -> float:
    """A reward that differs between almost any two responses."""
    return sum(letter in "aeiou" for letter in sample.response) / max(len(sample.response), 1)


def write_prompts(path: Path) -> None:
    """As many as a step takes, each of several blocks of an engine's cache."""
    text = "The clerk wrote a line in the book for every visitor of the house on the hill. Visitor number {} came at {}"
    lines = [json.dumps({"prompt": text.format(i + 1, 7 * i % 12 + 1)}) + "\n" for i in range(_PROMPTS)]
    path.write_text("".join(lines), encoding="utf-8")


def judged(name: str, model: Path, device: str, out: Path, limit_s: float) -> dict[str, Any] | None:
    """Make a run and compare it. Returns: the report's entry of the step; None if the run or the report failed."""
    folder = out / name
    flags = [*_FLAGS.split(), *_DEVICE_FLAGS[device].split(), "--hf-checkpoint", str(model)]
    flags += ["--prompt-data", str(out / "prompts.jsonl"), "--save-hf", str(folder / "hf" / "{rollout_id}")]
    broken = {} if name == "healthy" else {SERVER_VARIABLE: "benchmarks.agreement.broken_engine", BREAK_VARIABLE: name}
    if not train(name, flags, out, "0", steps=_STEPS, limit_s=limit_s, environment=broken):
        return None
    command = [sys.executable, "-m", "vime.cli.main", "mismatch", str(folder), "--step", str(_STEP), "--device", device]
    with (out / f"{name}_mismatch.log").open("w", encoding="utf-8") as log:
        ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        print(f"broken: vime mismatch of {name} ended with exit code {ended.returncode}; see {log.name}", flush=True)
        return None
    report: dict[str, Any] = json.loads((folder / "mismatch" / "report.json").read_text(encoding="utf-8"))
    entry: dict[str, Any] = report["steps"][0]
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", dest="device", action="store_const", const="cpu")
    where.add_argument("--cuda", dest="device", action="store_const", const="cuda")
    parser.add_argument("--model", type=Path, help="HF checkpoint; default: a tiny random one")
    parser.add_argument("--out", type=Path, default=Path("runs/broken"))
    parser.add_argument("--at-a-time", type=int, default=1, help="runs side by side")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a run may take")
    given = parser.parse_args()
    if given.at_a_time < 1:
        parser.error(f"--at-a-time is {given.at_a_time}; give 1 or more")
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_prompts(out / "prompts.jsonl")
    model = given.model.resolve() if given.model else out / "model"
    if not model.exists():
        dtype = "float32" if given.device == "cpu" else "bfloat16"
        command = [sys.executable, "-m", "vime.cli.main", "init-model", str(model), "--vocab", "bytes"]
        subprocess.run([*command, "--dtype", dtype], cwd=ROOT, check=True)
    with ThreadPoolExecutor(given.at_a_time) as pool:
        entries = list(pool.map(lambda name: judged(name, model, given.device, out, given.limit), VERDICTS))
    print("| run | trainer - engine, step by step | engine | wanted |\n|---|---|---|---|")
    rows, right = [], True
    for (name, wanted), entry in zip(VERDICTS.items(), entries, strict=True):
        found = entry["verdicts"]["engine"] if entry else {"word": "no verdict", "sentence": ""}
        steps = read_differences(out / name) if done(out / name) else []
        right &= found["word"] == wanted
        numbers = ", ".join(f"{x:.1e}" for x in steps)
        print(f"| {name} | {numbers} | {found['word']}: {found['sentence']} | {wanted} |")
        rows.append({"run": name, "trainer_engine": steps, **found, "wanted": wanted})
    (out / "broken.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
