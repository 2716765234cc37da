"""What `train_async.py` gains over `train.py` where generation and training take equally long.

    python benchmarks/one_step_ahead.py [--seconds 4] [--steps 8] [--out runs/one_step_ahead]

Both sides are slowed by functions of a user's: a generate function holds each answer back until generation has lasted
`--seconds`, and a hook of the trainer waits as long before its step. A tiny model computes for a fraction of that, so
that the figures are of the loops, and not of who else uses this machine's cores. Same seeds; the first two steps of a
run and the last are left out. Writes results.json, prints a table, and exits with 1 if the gain is below 1.5, or if the
two were not equally long after all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import step_overhead  # noqa: E402
from vime.protocols import RolloutContext, SamplingParams, TrainerContext  # noqa: E402
from vime.types import Sample  # noqa: E402

PROMPTS, SAMPLES, RESPONSE_LEN, PROMPT_LEN = 4, 4, 8, 16
WARM_UP_STEPS = 2
MIN_GAIN, MAX_RATIO = 1.5, 1.25


async def generate(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """One request of a slow engine. All samples of a rollout begin at the same time."""
    begin = time.monotonic()
    await step_overhead.generate(config, sample, sampling_params)
    await asyncio.sleep(begin + sample.metadata["seconds"] - time.monotonic())
    return sample


def wait(
    config: TrainerContext, rollout_id: int, step_id: int, model: object, optimizer: object, scheduler: object
) -> None:
    """Before each step of a slow trainer. How long, the prompts say, which the generate function reads as well."""
    first_prompt = Path(config.config.data.prompt_data[0]).read_text(encoding="utf-8").splitlines()[0]
    time.sleep(json.loads(first_prompt)["metadata"]["seconds"])


async def reward(config: RolloutContext, sample: Sample) -> float:
    """The share of digits: cheap, and different for each sample."""
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def run(*command: str) -> None:
    """Run a Python command of this checkout. Raises: CalledProcessError."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": path})


def write_prompts(path: Path, count: int, seconds: float) -> None:
    """`count` prompts of PROMPT_LEN characters, which are PROMPT_LEN tokens; seeded."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh 0123456789", k=PROMPT_LEN)) for _ in range(count)]
    lines = [json.dumps({"input": text, "metadata": {"seconds": seconds}}) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(program: str, out: Path, steps: int) -> dict[str, float]:
    """Medians of a run's steps, in seconds: the step, generation, training, waiting for generation, the weight sync."""
    folder, own = out / Path(program).stem, Path(__file__).stem
    run(
        *(program, "--platform", "cpu", "--hf-checkpoint", str(out / "model")),
        *("--prompt-data", str(out / "prompts.jsonl"), "--run-dir", str(folder), "--num-rollout", str(steps)),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
        *("--rollout-max-response-len", str(RESPONSE_LEN), "--rollout-max-context-len", str(PROMPT_LEN + RESPONSE_LEN)),
        *("--custom-generate-function-path", f"{own}.generate", "--custom-rm-path", f"{own}.reward"),
        *("--custom-megatron-before-train-step-hook-path", f"{own}.wait"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--lr", "1e-5", "--weight-probe-interval", "0"),
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "perf/step_time" in row][WARM_UP_STEPS:-1]

    def median(*names: str) -> float:
        return statistics.median(sum(row.get(f"perf/{name}", 0.0) for name in names) for row in rows)

    return {
        "steps": float(len(rows)),
        "step_s": median("step_time"),
        "generation_s": median("rollout_time", "rollout_s"),
        "training_s": median("train_time"),
        "wait_s": median("rollout_wait_time"),
        "weight_sync_s": median("update_weights_time"),
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """A row a program."""
    names = list(next(iter(results.values())))
    rows = [("", *names), *((run, *(f"{figures[name]:.2f}" for name in names)) for run, figures in results.items())]
    return "\n".join("".join(f"{cell:>16}" for cell in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long generation and training take, each")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of each run, of which two and the last do not count"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "one_step_ahead")
    options = parser.parse_args()
    if options.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run("-m", "vime.cli.main", "init-model", str(out / "model"))
    write_prompts(out / "prompts.jsonl", options.steps * PROMPTS, options.seconds)
    results = {program: measured(program, out, options.steps) for program in ("train.py", "train_async.py")}
    gain = results["train.py"]["step_s"] / results["train_async.py"]["step_s"]
    versions = json.loads((out / "train_async" / "versions.json").read_text(encoding="utf-8"))
    figures = {"gain": gain, "seconds": results, "versions": versions}
    (out / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(results))
    print(f"one step ahead, a step is {gain:.2f} times as fast")
    for program, seconds in results.items():
        short, long = sorted((seconds["generation_s"], seconds["training_s"]))
        if long > MAX_RATIO * short:
            raise SystemExit(f"one_step_ahead: {program} took {short:.2f} and {long:.2f} s; give more --seconds")
    if gain < MIN_GAIN:
        raise SystemExit(f"one_step_ahead: expected at least {MIN_GAIN} times")


if __name__ == "__main__":
    main()
