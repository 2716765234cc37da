"""What each of the three loops makes of rewards that take long-tailed random time.

    python benchmarks/long_tail.py [--stub] [--steps 12] [--train-seconds 1] [--out runs/long_tail]

A reward waits, as a tool or a judge elsewhere would: most of them for a moment, a few for many times as long (Pareto,
shape 1.2, at least 0.25 s, at most 12 s; drawn from the sample's number, so the same in every run). The engine is a
real one with a tiny model, busy while it has a request; every response has the same length, and it takes two requests
at a time, as one short of memory would, so that generation takes longer than training. A hook of the trainer waits
before each step, so that training takes its time without the machine's cores, which the engine needs. With --stub the
engine is the tests' stub, which takes a fixed time for a token and next to none of the cores: then the figures are of
the loops alone, whoever else uses the machine.

    train.py                                   generate, wait for the slowest reward, train, sync
    train_async.py                             the next rollout meanwhile
    train_async.py --fully-async               engines begin with a group whenever one is generated

Figures are over the steps that are left without the first two and the last ones, in which fully asynchronous engines
run out of work. Writes results.json, prints a table, and exits with 1 where the fully asynchronous run keeps its
engines busy for less than 95 % of the time, or is less than 1.8 times as fast as the synchronous one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.stub_engine.settings import MODULE, StubSettings  # noqa: E402
from vime.engine.vllm.processes import SERVER_VARIABLE  # noqa: E402
from vime.protocols import RolloutContext, TrainerContext  # noqa: E402
from vime.types import Sample  # noqa: E402

PROMPTS, SAMPLES, PROMPT_LEN = 8, 4, 16
RESPONSE_LEN, STUB_RESPONSE_LEN, STUB_TOKEN_S = 256, 16, 0.35
MAX_NUM_SEQS = 2
SHAPE, LEAST_S, MOST_S = 1.2, 0.25, 12.0
MAX_STALENESS = 4
WARM_UP_STEPS = 2
MIN_GAIN, MIN_BUSY = 1.8, 0.95
PROGRAMS: dict[str, tuple[str, ...]] = {
    "synchronous": ("train.py",),
    "one step ahead": ("train_async.py",),
    "fully asynchronous": ("train_async.py", "--fully-async", "--max-staleness", str(MAX_STALENESS)),
}


def reward_seconds(sample_id: int) -> float:
    """How long the reward of a sample takes."""
    return min(MOST_S, LEAST_S * random.Random(f"long tail {sample_id}").paretovariate(SHAPE))


async def reward(config: RolloutContext, sample: Sample) -> float:
    """The share of digits, after a while."""
    await asyncio.sleep(reward_seconds(sample.sample_id))
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def wait(
    config: TrainerContext, rollout_id: int, step_id: int, model: object, optimizer: object, scheduler: object
) -> None:
    """Before each step of the trainer. How long, the prompts say."""
    first_prompt = Path(config.config.data.prompt_data[0]).read_text(encoding="utf-8").splitlines()[0]
    time.sleep(json.loads(first_prompt)["metadata"]["seconds"])


def run(*command: str, stub: bool = False) -> None:
    """Run a Python command of this checkout. Raises: CalledProcessError."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    engine = {SERVER_VARIABLE: MODULE, **StubSettings(token_s=STUB_TOKEN_S).to_environment()} if stub else {}
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": path, **engine})


def write_prompts(path: Path, count: int, seconds: float) -> None:
    """`count` prompts of PROMPT_LEN characters, which are PROMPT_LEN tokens; seeded."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh 0123456789", k=PROMPT_LEN)) for _ in range(count)]
    lines = [json.dumps({"input": text, "metadata": {"seconds": seconds}}) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(name: str, out: Path, steps: int, *, stub: bool) -> dict[str, float]:
    """Over the steps of a run that count: seconds of a step, shares of the time, what became of old groups."""
    folder, own, length = out / name.replace(" ", "_"), Path(__file__).stem, STUB_RESPONSE_LEN if stub else RESPONSE_LEN
    run(
        *PROGRAMS[name],
        *("--platform", "cpu", "--hf-checkpoint", str(out / "model")),
        *("--prompt-data", str(out / "prompts.jsonl"), "--run-dir", str(folder), "--num-rollout", str(steps)),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
        *("--rollout-max-response-len", str(length), "--rollout-max-context-len", str(PROMPT_LEN + length)),
        *(
            "--custom-generate-function-path",
            "step_overhead.generate",
            "--custom-rm-path",
            f"{own}.reward",
            "--custom-megatron-before-train-step-hook-path",
            f"{own}.wait",
        ),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--lr", "1e-5", "--weight-probe-interval", "0"),
        *(() if stub else ("--vllm-max-num-seqs", str(MAX_NUM_SEQS))),
        stub=stub,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "perf/step_time" in row][WARM_UP_STEPS : -MAX_STALENESS - 1]
    total = sum(row["perf/step_time"] for row in rows)

    def share(*names: str) -> float:
        return sum(row.get(f"perf/{name}", 0.0) for row in rows for name in names) / total

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows) / len(rows)

    return {
        "steps": float(len(rows)),
        "step_s": total / len(rows),
        "engine_busy": share("engine_busy_s"),
        "trainer_idle": 1 - share("train_time"),
        "waits_for_data": share("rollout_time", "rollout_wait_time"),
        "sync": share("rollout_pause_time", "update_weights_time"),
        "tokens_per_s": mean("rollout/num_tokens") * len(rows) / total,
        "staleness_mean": mean("staleness/mean"),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "dropped_groups": sum(row.get("stream/dropped_stale_groups", 0.0) for row in rows),
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """A row a program."""
    names = list(next(iter(results.values())))
    rows = [("", *names), *((run, *(f"{figures[name]:.2f}" for name in names)) for run, figures in results.items())]
    return "\n".join(f"{row[0]:<20}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="rollouts of each run")
    parser.add_argument("--train-seconds", type=float, default=1.0, help="what the trainer waits before each step")
    parser.add_argument("--stub", action="store_true", help="an engine that computes next to nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "long_tail")
    options = parser.parse_args()
    if options.steps < WARM_UP_STEPS + MAX_STALENESS + 3:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + MAX_STALENESS + 3}")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run("-m", "vime.cli.main", "init-model", str(out / "model"))
    write_prompts(out / "prompts.jsonl", options.steps * PROMPTS, options.train_seconds)
    results = {name: measured(name, out, options.steps, stub=options.stub) for name in PROGRAMS}
    stream, sync = results["fully asynchronous"], results["synchronous"]
    gain = sync["step_s"] / stream["step_s"]
    versions = json.loads((out / "synchronous" / "versions.json").read_text(encoding="utf-8"))
    figures = {"engine": "stub" if options.stub else "vLLM", "gain": gain, "runs": results, "versions": versions}
    (out / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(results))
    print(f"fully asynchronous, a step is {gain:.2f} times as fast; its engines are busy {stream['engine_busy']:.1%}")
    if gain < MIN_GAIN or stream["engine_busy"] < MIN_BUSY:
        raise SystemExit(f"long_tail: expected at least {MIN_GAIN} times, and engines busy {MIN_BUSY:.0%}")


if __name__ == "__main__":
    main()
