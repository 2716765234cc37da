"""What `train_async.py` gains over `train.py` where generation and training take equally long.

    python benchmarks/one_step_ahead.py [--steps 8] [--out runs/one_step_ahead]

A Qwen3 of 9.5M parameters trains on 32 samples of 208 tokens a step, float32, one rank and one engine. The engine is
slowed by a generate function that waits before it asks: first not at all, to see how long training and generation take,
then by their difference. Both programs then run with the same seeds. The first two steps and the last are left out.
Writes results.json, prints a table, and exits with 1 if the gain is below 1.5.
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
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from vime.protocols import GenerateRequest, RolloutContext, SamplingParams  # noqa: E402
from vime.types import Sample, SampleStatus  # noqa: E402

PROMPTS, SAMPLES, RESPONSE_LEN, PROMPT_LEN = 8, 4, 16, 192
MODEL = {"hidden-size": 384, "num-layers": 6, "num-heads": 6, "num-kv-heads": 2, "head-size": 64, "ffn-size": 1024}
WARM_UP_STEPS = 2
MIN_GAIN = 1.5


async def generate(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """One request, as if the engine took `delay_s` longer. All samples of a rollout wait at the same time."""
    await asyncio.sleep(sample.metadata["delay_s"])
    request = GenerateRequest(
        request_id=f"sample-{sample.sample_id}",
        token_ids=sample.tokens,
        sampling=replace(sampling_params, n=1, ignore_eos=True),
    )
    (answer,) = await config.engines.generate(request)
    sample.append_response(answer.token_ids, answer.log_probs, version=answer.weight_versions)
    sample.response = config.tokenizer.decode(sample.response_tokens)
    sample.status = SampleStatus.TRUNCATED
    return sample


async def reward(config: RolloutContext, sample: Sample) -> float:
    """The share of digits: cheap, and different for each sample."""
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def run(*command: str) -> None:
    """Run a Python command of this checkout. Raises: CalledProcessError."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": path})


def write_prompts(path: Path, count: int, delay_s: float) -> None:
    """`count` prompts of PROMPT_LEN characters, which are PROMPT_LEN tokens; seeded."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh 0123456789", k=PROMPT_LEN)) for _ in range(count)]
    lines = [json.dumps({"input": text, "metadata": {"delay_s": delay_s}}) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(program: str, out: Path, name: str, steps: int, delay_s: float) -> dict[str, float]:
    """Medians of a run's steps, in seconds: the step, generation, training, waiting for generation, the weight sync."""
    write_prompts(out / f"{name}.jsonl", steps * PROMPTS, delay_s)
    run(
        *(program, "--platform", "cpu", "--hf-checkpoint", str(out / "model")),
        *("--prompt-data", str(out / f"{name}.jsonl"), "--run-dir", str(out / name), "--num-rollout", str(steps)),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
        *("--rollout-max-response-len", str(RESPONSE_LEN), "--rollout-max-context-len", str(PROMPT_LEN + RESPONSE_LEN)),
        *("--custom-generate-function-path", f"{Path(__file__).stem}.generate"),
        *("--custom-rm-path", f"{Path(__file__).stem}.reward"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--lr", "1e-5", "--weight-probe-interval", "0"),
    )
    rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
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
    """A row a run."""
    names = list(next(iter(results.values())))
    rows = [("", *names), *((run, *(f"{figures[name]:.2f}" for name in names)) for run, figures in results.items())]
    return "\n".join("".join(f"{cell:>16}" for cell in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of each run; the first two and the last do not count"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "one_step_ahead")
    options = parser.parse_args()
    if options.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shape = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    run("-m", "vime.cli.main", "init-model", str(out / "model"), *shape)
    plain = measured("train.py", out, "without_delay", options.steps, 0.0)
    delay_s = max(0.0, plain["training_s"] - plain["generation_s"])
    results = {
        "without_delay": plain,
        "train.py": measured("train.py", out, "in_turns", options.steps, delay_s),
        "train_async.py": measured("train_async.py", out, "one_step_ahead", options.steps, delay_s),
    }
    gain = results["train.py"]["step_s"] / results["train_async.py"]["step_s"]
    versions = json.loads((out / "in_turns" / "versions.json").read_text(encoding="utf-8"))
    figures = {"delay_s": delay_s, "gain": gain, "seconds": results, "versions": versions}
    (out / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(results))
    print(f"the engine waited {delay_s:.2f} s; a step one ahead is {gain:.2f} times as fast")
    if gain < MIN_GAIN:
        raise SystemExit(f"one_step_ahead: expected at least {MIN_GAIN} times")


if __name__ == "__main__":
    main()
