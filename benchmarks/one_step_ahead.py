"""What `train_async.py` gains over `train.py` where generation and training take equally long.

    python benchmarks/one_step_ahead.py [--steps 8] [--rounds 2] [--out runs/one_step_ahead]

A Qwen3 of 9.5M parameters trains on 32 samples of 208 tokens a step, float32, one rank and one engine. The engine is
slowed by a generate function that holds every answer back until generation has taken as long as the training of the
last step. The programs run in turns, each `--rounds` times, with the same seeds; the first two steps and the last of a
run are left out. Writes results.json, prints a table, and exits with 1 if the gain is below 1.5, or if generation and
training turned out to differ by more than a quarter, because something else used the machine.
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
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from vime.protocols import GenerateRequest, RolloutContext, SamplingParams  # noqa: E402
from vime.types import Sample, SampleStatus  # noqa: E402

PROMPTS, SAMPLES, RESPONSE_LEN, PROMPT_LEN = 8, 4, 16, 192
MODEL = {"hidden-size": 384, "num-layers": 6, "num-heads": 6, "num-kv-heads": 2, "head-size": 64, "ffn-size": 1024}
WARM_UP_STEPS = 2
MIN_GAIN, MAX_RATIO = 1.5, 1.25


async def generate(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """One request of an engine that is as slow as the trainer. All samples of a rollout begin at the same time."""
    begin = time.monotonic()
    rows = steps_of(Path(config.config.log.run_dir))
    request = GenerateRequest(
        request_id=f"sample-{sample.sample_id}",
        token_ids=sample.tokens,
        sampling=replace(sampling_params, n=1, ignore_eos=True),
    )
    (answer,) = await config.engines.generate(request)
    sample.append_response(answer.token_ids, answer.log_probs, version=answer.weight_versions)
    sample.response = config.tokenizer.decode(sample.response_tokens)
    sample.status = SampleStatus.TRUNCATED
    if rows:
        await asyncio.sleep(begin + rows[-1]["perf/train_time"] - time.monotonic())
    return sample


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps so far."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "perf/step_time" in row]


async def reward(config: RolloutContext, sample: Sample) -> float:
    """The share of digits: cheap, and different for each sample."""
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def run(*command: str) -> None:
    """Run a Python command of this checkout. Raises: CalledProcessError."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": path})


def write_prompts(path: Path, count: int) -> None:
    """`count` prompts of PROMPT_LEN characters, which are PROMPT_LEN tokens; seeded."""
    rng = random.Random(0)
    lines = [json.dumps({"input": "".join(rng.choices("abcdefgh 0123456789", k=PROMPT_LEN))}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_program(program: str, out: Path, folder: Path, steps: int) -> list[dict[str, float]]:
    """The metrics of its steps that count."""
    run(
        *(program, "--platform", "cpu", "--hf-checkpoint", str(out / "model")),
        *("--prompt-data", str(out / "prompts.jsonl"), "--run-dir", str(folder), "--num-rollout", str(steps)),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
        *("--rollout-max-response-len", str(RESPONSE_LEN), "--rollout-max-context-len", str(PROMPT_LEN + RESPONSE_LEN)),
        *("--custom-generate-function-path", f"{Path(__file__).stem}.generate"),
        *("--custom-rm-path", f"{Path(__file__).stem}.reward"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--lr", "1e-5", "--weight-probe-interval", "0"),
    )
    return steps_of(folder)[WARM_UP_STEPS:-1]


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of steps, in seconds: the step, generation, training, waiting for generation, the weight sync."""

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
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of each run; the first two and the last do not count"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each program")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "one_step_ahead")
    options = parser.parse_args()
    if options.steps < WARM_UP_STEPS + 2 or options.rounds < 1:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}, --rounds at least 1")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shape = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    run("-m", "vime.cli.main", "init-model", str(out / "model"), *shape)
    write_prompts(out / "prompts.jsonl", options.steps * PROMPTS)
    steps: dict[str, list[dict[str, float]]] = {"train.py": [], "train_async.py": []}
    for number in range(options.rounds):
        for program, rows in steps.items():
            folder = out / f"{Path(program).stem}_{number}"
            rows += run_program(program, out, folder, options.steps)
    results = {program: medians(rows) for program, rows in steps.items()}
    gain = results["train.py"]["step_s"] / results["train_async.py"]["step_s"]
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    figures = {"gain": gain, "seconds": results, "versions": versions}
    (out / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(results))
    print(f"one step ahead, a step is {gain:.2f} times as fast")
    for program, seconds in results.items():
        short, long = sorted((seconds["generation_s"], seconds["training_s"]))
        if long > MAX_RATIO * short:
            raise SystemExit(
                f"one_step_ahead: {program} took {short:.2f} and {long:.2f} s, not equally long; run it again"
            )
    if gain < MIN_GAIN:
        raise SystemExit(f"one_step_ahead: expected at least {MIN_GAIN} times")


if __name__ == "__main__":
    main()
