"""How much of an RL step on this machine is neither generation, nor training, nor weight transfer.

    python benchmarks/step_overhead.py [--steps 12] [--out runs/step_overhead]

Two workloads through `train.py`, synchronous, float32, one engine, nothing else running:
  requests    a Qwen3 of 9.5M parameters, 64 requests of exactly 128 response tokens a step (8 prompts x 8 samples)
  quickstart  the quickstart's model and recipe: 1,024 responses of up to 5 tokens a step
and, before and after the first of them, offline vLLM (`vllm.LLM.generate`) with the engine's own arguments,
environment and thread count on the same prompts. The first two steps of each run are left out. Writes results.json and
prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

from vime.protocols import GenerateRequest, RolloutContext, SamplingParams  # noqa: E402
from vime.types import Sample, SampleStatus  # noqa: E402

PROMPTS, SAMPLES, RESPONSE_LEN, PROMPT_LEN = 8, 8, 128, 64
MODEL = {"hidden-size": 384, "num-layers": 6, "num-heads": 6, "num-kv-heads": 2, "head-size": 64, "ffn-size": 1024}
WARM_UP_STEPS = 2
MAX_OTHER, MAX_TRANSFER, MIN_OF_OFFLINE = 0.15, 0.10, 0.75


async def generate(config: RolloutContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """One request for one sample, of exactly --rollout-max-response-len tokens: a random model would end early."""
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


def write_prompts(path: Path, count: int) -> None:
    """`count` prompts of PROMPT_LEN characters, which are PROMPT_LEN tokens; seeded."""
    rng = random.Random(0)
    lines = [json.dumps({"input": "".join(rng.choices("abcdefgh 0123456789", k=PROMPT_LEN))}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps; warm-up, and steps that evaluated, left out."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [r for r in records if "perf/step_time" in r and "perf/eval_time" not in r][WARM_UP_STEPS:]


def shares(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over steps: seconds, and shares of the step. The rollout's stage counts as generation here; its own
    overhead is what `of_offline` measures."""

    def median(value: Any) -> float:
        return statistics.median(value(s) for s in steps)

    def compute(s: dict[str, Any]) -> float:
        return sum(s.get(f"perf/{part}_time", 0.0) for part in ("actor_train", "log_probs", "ref_log_probs"))

    def other(s: dict[str, Any]) -> float:
        return s["perf/step_time"] - s["perf/rollout_time"] - compute(s) - s["perf/update_weights_time"]

    return {
        "steps": len(steps),
        "step_s": median(lambda s: s["perf/step_time"]),
        "step_s_min": min(s["perf/step_time"] for s in steps),
        "step_s_max": max(s["perf/step_time"] for s in steps),
        "generation": median(lambda s: s["perf/rollout_time"] / s["perf/step_time"]),
        "training": median(lambda s: compute(s) / s["perf/step_time"]),
        "transfer": median(lambda s: s["perf/update_weights_time"] / s["perf/step_time"]),
        "other": median(lambda s: other(s) / s["perf/step_time"]),
        "rollout_tokens_per_s": median(lambda s: s["rollout/num_tokens"] / s["perf/rollout_time"]),
    }


def offline(model: Path, prompts: Path, batches: int) -> dict[str, float]:
    """Offline vLLM's tokens per second on the run's requests, in a process of its own."""
    command = [str(Path(__file__)), "--offline", str(model), "--prompts", str(prompts), "--steps", str(batches)]
    result = model.parent / "offline.json"
    run(*command, "--result", str(result))
    return dict(json.loads(result.read_text(encoding="utf-8")))


def run_offline(model: Path, prompts: Path, batches: int, result: Path) -> None:
    """The child of `offline`: the engine's own arguments and environment, without HTTP, router or vime."""
    from vime.platform import get_platform

    platform = get_platform("cpu")
    os.environ.update(platform.engine_environment())  # before torch reads the thread count
    import time

    import torch
    from transformers import AutoTokenizer
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    from vime.config.dtype import stored_dtype

    hf_config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    arguments = {**platform.engine_arguments(PROMPT_LEN + RESPONSE_LEN), "dtype": stored_dtype(hf_config)}
    llm = LLM(str(model), logprobs_mode="processed_logprobs", **arguments)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["input"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    rates = []
    for batch in range(batches):
        chosen = texts[batch * PROMPTS : (batch + 1) * PROMPTS]
        requests = [{"prompt_token_ids": tokenizer.encode(t, add_special_tokens=False)} for t in chosen] * SAMPLES
        sampling = [
            VllmSampling(
                temperature=1.0, max_tokens=RESPONSE_LEN, ignore_eos=True, logprobs=0, detokenize=False, seed=i
            )
            for i in range(len(requests))
        ]
        begin = time.perf_counter()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    rates = rates[WARM_UP_STEPS:]
    figures = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
    result.write_text(json.dumps({**figures, "threads": torch.get_num_threads()}), encoding="utf-8")


def requests_workload(out: Path, steps: int) -> dict[str, Any]:
    """The 64 requests of 128 tokens, with offline vLLM before and after."""
    model, prompts = out / "model", out / "prompts.jsonl"
    shape = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    run("-m", "vime.cli.main", "init-model", str(model), *shape)
    write_prompts(prompts, steps * PROMPTS)
    before = offline(model, prompts, steps)
    run(
        *("train.py", "--platform", "cpu", "--hf-checkpoint", str(model), "--prompt-data", str(prompts)),
        *("--run-dir", str(out / "requests"), "--num-rollout", str(steps), "--rollout-batch-size", str(PROMPTS)),
        *("--n-samples-per-prompt", str(SAMPLES), "--rollout-max-response-len", str(RESPONSE_LEN)),
        *("--rollout-max-context-len", str(PROMPT_LEN + RESPONSE_LEN)),
        *("--custom-generate-function-path", "step_overhead.generate", "--custom-rm-path", "step_overhead.reward"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--lr", "1e-5"),
    )
    after = offline(model, prompts, steps)
    figures: dict[str, Any] = shares(steps_of(out / "requests"))
    offline_rate = statistics.mean([before["median"], after["median"]])
    return {
        **figures,
        "offline_tokens_per_s": {"before": before, "after": after},
        "of_offline": figures["rollout_tokens_per_s"] / offline_rate,
    }


def quickstart_workload(out: Path, steps: int) -> dict[str, Any]:
    """The quickstart's GRPO steps, on its model before the warm-up (the responses are as long)."""
    from problems import write_problems

    data, heldout = write_problems(out / "data", seed=0)
    run("-m", "vime.cli.main", "init-model", str(out / "quickstart_model"))
    run(
        *("train.py", "--platform", "cpu", "--config", "examples/quickstart/grpo.yaml"),
        *("--hf-checkpoint", str(out / "quickstart_model"), "--prompt-data", str(data)),
        *("--eval-prompt-data", "heldout", str(heldout), "--skip-eval-before-train"),
        *("--run-dir", str(out / "quickstart"), "--num-rollout", str(steps + 1)),  # the last evaluates
    )
    return shares(steps_of(out / "quickstart"))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures beside their limits."""
    rows = [("", *results, "limit")]
    limits = {
        "transfer": f"<= {MAX_TRANSFER:.0%}",
        "other": f"<= {MAX_OTHER:.0%}",
        "of_offline": f">= {MIN_OF_OFFLINE:.0%}",
    }
    for name in ("step_s", "generation", "training", "transfer", "other", "rollout_tokens_per_s", "of_offline"):
        cells = [r.get(name) for r in results.values()]
        kind = ".2f" if name == "step_s" else ",.0f" if name == "rollout_tokens_per_s" else ".1%"
        rows.append((name, *("" if c is None else format(c, kind) for c in cells), limits.get(name, "")))
    return "\n".join("".join(f"{cell:>22}" for cell in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of each workload, 2 of them warm-up")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "step_overhead")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offline is not None:
        run_offline(options.offline, options.prompts, options.steps, options.result)
        return
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("requests", "quickstart"):  # of an earlier measurement in the same folder
        shutil.rmtree(out / stale, ignore_errors=True)
    results = {
        "requests": requests_workload(out, options.steps),
        "quickstart": quickstart_workload(out, options.steps),
    }
    versions = json.loads((out / "requests" / "versions.json").read_text(encoding="utf-8"))
    (out / "results.json").write_text(json.dumps({**results, "versions": versions}, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
