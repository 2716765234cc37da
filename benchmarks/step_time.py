"""The whole RL step of vime on CUDA devices, beside offline vLLM and the devices' arithmetic limit.

    python benchmarks/step_time.py scripts/models/qwen3-0.6b/config.json --work w1 --out step_time.jsonl
    python benchmarks/step_time.py scripts/models/qwen3-30b-a3b/config.json --num-layers 6 --prompts 128 --work w2
    python benchmarks/step_time.py scripts/models/qwen3-0.6b/config.json --work w1 --layout ahead      # two devices

GRPO steps of `train.py` (`--layout ahead`: `train_async.py`) with a model of the shape that an HF config.json says,
random bf16 weights, prompts of --prompt-len tokens and responses of exactly --response-len (the model has no token that
ends one). Before the run, each in a process of its own: the matrix product that MFU is measured against, and offline
vLLM of the same version on the same prompts; with --work they and the model stay in a folder for the next layout.
The first steps are left out. Words after `--` are further flags of the run. A run that takes longer than --timeout, or
is interrupted, is ended, and its steps so far count. Prints a line of JSON, and appends it to the file --out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.device_watch import DeviceWatch, used_bytes  # noqa: E402
from benchmarks.workload import add_shape, offline, prompt_ids, prompt_text, write_model  # noqa: E402
from vime.models import family_of  # noqa: E402
from vime.models.flops import forward_flops  # noqa: E402
from vime.protocols import RolloutContext  # noqa: E402
from vime.types import Sample  # noqa: E402

SHAPE = ("platform", "prompts", "samples", "prompt_len", "response_len", "utilization")
LAYOUTS = {
    "colocated": ("train.py", "--colocate", "--actor-num-gpus-per-node", "1"),
    "separate": ("train.py", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    "ahead": ("train_async.py", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
}
COMPUTE = ("actor_train", "log_probs", "ref_log_probs", "values", "critic_train")
_INTERRUPT_S = 40.0  # a run that is ended early closes its processes within that


async def reward(config: RolloutContext, sample: Sample) -> float:
    """Cheap, and different for the samples of a group."""
    return random.Random(hash(sample.response_tokens)).random()


class Child:
    """What this file gives for `--child task`, in a process of its own: its device memory is free again after it.

    Found in the folder already, it is not made again.
    """

    def __init__(self, folder: Path, task: str, options: argparse.Namespace, device: str | None = None) -> None:
        self._result, self._timeout_s = folder / f"{task}.json", options.timeout
        self._process: subprocess.Popen[bytes] | None = None
        if self._result.exists():
            return
        command = [sys.executable, str(Path(__file__)), str(options.config), "--child", task, "--work", str(folder)]
        command += [w for name in SHAPE for w in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
        command += ["--num-layers", str(options.num_layers)] if options.num_layers else []
        command += ["--enforce-eager"] if options.enforce_eager else []
        environment = dict(os.environ) if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if it has not ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def result(self, wait_s: float | None = None) -> dict[str, Any]:
        """Wait for it, --timeout seconds unless said otherwise. Raises: SystemExit if it failed or took longer."""
        if self._process is not None:
            try:
                code: int | str = self._process.wait(self._timeout_s if wait_s is None else wait_s)
            except subprocess.TimeoutExpired:
                code = "none in time"
            if code != 0:
                raise SystemExit(f"{self._result.stem}: exit code {code}")
        return dict(json.loads(self._result.read_text(encoding="utf-8")))


def prepare(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> dict[str, float]:
    """Write the model; the arithmetic limits."""
    from benchmarks.train_step import matmul_tflops, sustained_matmul_tflops

    write_model(folder / "model", config, options.platform)
    if options.platform != "cuda":
        return {"matmul_tflops": 1.0}
    return {"matmul_tflops": matmul_tflops(), "matmul_sustained_tflops": sustained_matmul_tflops()}


def raw_vllm(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Offline vLLM, and what it has of the device."""
    if options.platform == "cpu":
        return offline(folder / "model", options, "cpu")
    before = used_bytes()  # no watching thread: vLLM forks its engine
    return offline(folder / "model", options, measure=lambda: used_bytes() - before)


CHILDREN = {"prepare": prepare, "offline": raw_vllm}


def run_flags(folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of the run behind its program."""
    length = options.prompt_len + options.response_len
    flags = {
        "hf-checkpoint": folder / "model",
        "prompt-data": folder / "prompts.jsonl",
        "run-dir": folder / f"run-{options.layout}",
        "num-rollout": options.steps,
        "rollout-batch-size": options.prompts,
        "n-samples-per-prompt": options.samples,
        "rollout-max-response-len": options.response_len,
        "rollout-max-context-len": length,
        "custom-rm-path": "benchmarks.step_time.reward",
        "max-tokens-per-gpu": options.micro_batch_tokens or 16 * length,
        "lr": "1e-6",
        "platform": options.platform,
        "vllm-max-num-seqs": options.prompts * options.samples,
    }
    words = [w for name, value in flags.items() for w in (f"--{name}", str(value))] + ["--use-dynamic-batch-size"]
    if options.platform == "cuda":
        words += ["--bf16", "--vllm-gpu-memory-utilization", str(options.utilization), *LAYOUTS[options.layout][1:]]
        words += ["--vllm-enforce-eager"] if options.enforce_eager else []
    return [*words, *options.flags]


def run_for(command: list[str], timeout_s: float) -> bool:
    """Run a program of this checkout in a session of its own; it is interrupted when the time is up, or when this is.

    Returns: whether it ended by itself. Raises: SystemExit if it failed.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        print(f"{command[1]} is ended: {type(reason).__name__}", file=sys.stderr, flush=True)
        os.kill(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_INTERRUPT_S)
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        raise SystemExit(f"{' '.join(command[1:3])} ended with exit code {code}")
    return True


def train(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """The metrics of the run's steps, the first ones left out, and what was seen of the device."""
    ids = prompt_ids(options.prompts * options.steps, options.prompt_len, config["vocab_size"])
    lines = [json.dumps({"input": prompt_text(tokens)}) for tokens in ids]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with DeviceWatch() if options.platform == "cuda" else nullcontext() as watch:
        begin = time.perf_counter()
        whole = run_for([sys.executable, LAYOUTS[options.layout][0], *run_flags(folder, options)], options.timeout)
        seconds = time.perf_counter() - begin
    metrics = folder / f"run-{options.layout}" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [r for r in records if "perf/step_time" in r]
    if len(steps) <= options.warm_up:
        raise SystemExit(f"the run made {len(steps)} steps, {options.warm_up} of them warm-up, so nothing is known")
    seen: dict[str, Any] = {"run_s": seconds, "ended_early": not whole, "first": steps[0]}
    if watch is not None:
        seen["device"] = {
            "peak_bytes": watch.peak_bytes - watch.before_bytes,
            "by_process": watch.peak_by_process,
            "engine_bytes": watch.engine_bytes(),
        }
    return steps[options.warm_up :], seen


def figures(steps: list[dict[str, Any]], limits: dict[str, Any], model: Any, options: argparse.Namespace) -> Any:
    """Medians over the steps."""
    samples, length = options.prompts * options.samples, options.prompt_len + options.response_len
    flops = 3 * forward_flops(model, [length] * samples, options.response_len * samples)
    names = sorted({name for s in steps for name in s})
    median = {n: statistics.median(s[n] for s in steps if n in s) for n in names}
    train_s, step_s = median["perf/actor_train_time"], median["perf/step_time"]
    rollout_s = median.get("perf/rollout_s", median.get("perf/rollout_time", 0.0))
    compute = sum(median.get(f"perf/{part}_time", 0.0) for part in COMPUTE)
    tokens = median["rollout/num_tokens"]
    result = {
        "steps": len(steps),
        "step_s": step_s,
        "step_s_all": [s["perf/step_time"] for s in steps],
        "rollout_s": rollout_s,
        "rollout_tokens_per_s": tokens / rollout_s,
        "of_offline_vllm": tokens / rollout_s / limits["tokens_per_s"],
        "train_s": train_s,
        "mfu": flops / train_s / 1e12 / limits["matmul_tflops"],
        "weight_sync_s": median["weight_sync/seconds"],
        "log_prob_abs_diff": median["train/train_rollout_logprob_abs_diff"],
        "median": {n: v for n, v in median.items() if n.startswith(("perf/", "memory/", "weight_sync/"))},
    }
    if options.layout == "ahead":
        result["of_the_longer"] = step_s / max(rollout_s, median["perf/train_time"])
    else:  # one after the other: the rest is what is none of the three
        result["other_share"] = 1 - (rollout_s + compute + median["weight_sync/seconds"]) / step_s
    return result


def parse(words: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, with what follows `--` in `flags`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an HF config.json")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--layout", choices=LAYOUTS, default="colocated")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it; no limit is met")
    add_shape(parser)
    parser.add_argument("--steps", type=int, default=4, help="warm-up included (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps left out (default: %(default)s)")
    parser.add_argument("--micro-batch-tokens", type=int, help="default: sixteen samples")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of each part (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="keep model, limits and runs here; default: a folder that goes again")
    parser.add_argument("--offline-device", help="measure offline vLLM on this device, while the run goes on")
    parser.add_argument("--only-limits", action="store_true", help="the two limits, without a run")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.flags = words[cut + 1 :]
    return parser, options


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's shell has its background jobs ignore it
    parser, options = parse(sys.argv[1:])
    config = json.loads(options.config.read_text(encoding="utf-8"))
    if options.num_layers:
        config["num_hidden_layers"] = options.num_layers
    if options.child:
        result = CHILDREN[options.child](options.work, options, config)
        (options.work / f"{options.child}.json").write_text(json.dumps(result), encoding="utf-8")
        return
    if options.steps <= options.warm_up:
        parser.error(f"--steps must be above --warm-up, {options.warm_up}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.work or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with Child(folder, "prepare", options) as child:
            limits = child.result()
        shape = {n: getattr(options, n) for n in ("layout", *SHAPE, "flags")}
        result = {"model": options.config.parent.name, "num_layers": config["num_hidden_layers"], **shape}
        with Child(folder, "offline", options, options.offline_device) as beside:
            if options.offline_device is None or options.only_limits:
                limits |= beside.result()
            if not options.only_limits:
                steps, seen = train(folder, options, config)
                limits |= beside.result(5.0 if seen["ended_early"] else None)  # this program is to end, too
                model = family_of(config).settings(config)
                versions = json.loads((folder / f"run-{options.layout}" / "versions.json").read_text(encoding="utf-8"))
                result |= {**figures(steps, limits, model, options), **seen, "versions": versions}
                if "device" in seen:
                    engine = seen["device"]["engine_bytes"] or limits["device_bytes"]
                    result["trainer_adds_bytes"] = seen["device"]["peak_bytes"] - engine
    from benchmarks.common import say  # imports torch

    say({**result, "limits": limits}, options.out)


if __name__ == "__main__":
    main()
