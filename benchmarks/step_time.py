"""The whole RL step of vime on CUDA devices, beside offline vLLM and the devices' arithmetic limit.

    python benchmarks/step_time.py scripts/models/qwen3-0.6b/config.json --out step_time.jsonl
    python benchmarks/step_time.py scripts/models/qwen3-30b-a3b/config.json --num-layers 6 --prompts 128
    python benchmarks/step_time.py scripts/models/qwen3-0.6b/config.json --layout ahead      # two devices

GRPO steps of `train.py` (`--layout ahead`: `train_async.py`) with a model of the shape that an HF config.json says,
random bf16 weights, prompts of --prompt-len tokens and responses of exactly --response-len (the model has no token that
ends one). Before the run, each in a process of its own: the matrix product that MFU is measured against, and offline
vLLM of the same version on the same prompts. The first steps are left out. Words after `--` are further flags of the
run. Prints a line of JSON, and appends it to the file --out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vime.models import family_of  # noqa: E402
from vime.models.flops import forward_flops  # noqa: E402
from vime.protocols import RolloutContext  # noqa: E402
from vime.types import Sample  # noqa: E402

WARM_UP_STEPS = 2
LAYOUTS = {
    "colocated": ("train.py", "--colocate", "--actor-num-gpus-per-node", "1"),
    "separate": ("train.py", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    "ahead": ("train_async.py", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
}
# What is neither generation, nor the trainer's arithmetic, nor weight transfer: all stages but these.
COMPUTE = ("actor_train", "log_probs", "ref_log_probs", "values", "critic_train")


async def reward(config: RolloutContext, sample: Sample) -> float:
    """Cheap, and different for the samples of a group."""
    return random.Random(hash(sample.response_tokens)).random()


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Random weights, and a tokenizer with a word `w<id>` for each id and no end of sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.common import write_checkpoint

    write_checkpoint(folder, {**config, "eos_token_id": None, "bos_token_id": None})
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0").save_pretrained(folder)


def prompt_ids(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of `length` random ids; seeded."""
    rng = random.Random(0)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for _ in range(count)]


def child(folder: Path, task: str, options: argparse.Namespace) -> dict[str, float]:
    """What this file gives for `--child task`, in a process of its own: its device memory is free again after it."""
    command = [sys.executable, str(Path(__file__)), str(options.config), "--child", task, "--folder", str(folder)]
    for name in ("prompts", "samples", "prompt_len", "response_len", "utilization"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    subprocess.run([*command, *(["--num-layers", str(options.num_layers)] if options.num_layers else [])], check=True)
    return dict(json.loads((folder / f"{task}.json").read_text(encoding="utf-8")))


def prepare(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> dict[str, float]:
    """Write the model; the arithmetic limit."""
    from benchmarks.train_step import matmul_tflops

    write_model(folder / "model", config)
    return {"matmul_tflops": matmul_tflops()}


def offline(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> dict[str, float]:
    """`vllm.LLM.generate` on the step's requests, twice after a short one."""
    from vime.platform import get_platform

    os.environ.update(get_platform("cuda").engine_environment())
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / "model"),
        dtype="bfloat16",
        gpu_memory_utilization=options.utilization,
        max_model_len=options.prompt_len + options.response_len,
        max_num_seqs=options.prompts * options.samples,
        logprobs_mode="processed_logprobs",
    )
    ids = prompt_ids(options.prompts, options.prompt_len, config["vocab_size"])
    prompts = [{"prompt_token_ids": tokens} for tokens in ids]
    sampling = SamplingParams(
        n=options.samples, max_tokens=options.response_len, ignore_eos=True, logprobs=0, detokenize=False
    )
    llm.generate(prompts[:4], sampling, use_tqdm=False)
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        times.append(time.perf_counter() - begin)
    return {"generation_s": min(times), "generation_s_max": max(times)}


CHILDREN = {"prepare": prepare, "offline": offline}


def train(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of the run's steps, the first ones left out."""
    ids = prompt_ids(options.prompts * options.steps, options.prompt_len, config["vocab_size"])
    lines = [json.dumps({"input": " ".join(f"w{i}" for i in tokens)}) for tokens in ids]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    program, *layout = LAYOUTS[options.layout]
    length = options.prompt_len + options.response_len
    flags = {
        "hf-checkpoint": folder / "model",
        "prompt-data": folder / "prompts.jsonl",
        "run-dir": folder / "run",
        "num-rollout": options.steps,
        "rollout-batch-size": options.prompts,
        "n-samples-per-prompt": options.samples,
        "rollout-max-response-len": options.response_len,
        "rollout-max-context-len": length,
        "custom-rm-path": "benchmarks.step_time.reward",
        "max-tokens-per-gpu": options.micro_batch_tokens or 16 * length,
        "lr": "1e-6",
        "vllm-gpu-memory-utilization": options.utilization,
        "vllm-max-num-seqs": options.prompts * options.samples,
        "vllm-enforce-eager": "false" if not options.enforce_eager else "true",
    }
    words = [w for name, value in flags.items() for w in (f"--{name}", str(value))]
    words += ["--platform", "cuda", "--bf16", "--use-dynamic-batch-size", *layout, *options.flags]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, program, *words], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": path})
    records = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [r for r in map(json.loads, records) if "perf/step_time" in r][WARM_UP_STEPS:]


def figures(steps: list[dict[str, Any]], limits: dict[str, float], model: Any, options: argparse.Namespace) -> Any:
    """Medians over the steps."""
    samples, length = options.prompts * options.samples, options.prompt_len + options.response_len
    flops = 3 * forward_flops(model, [length] * samples, options.response_len * samples)
    names = sorted({name for s in steps for name in s if name.startswith(("perf/", "memory/"))})
    median = {n: statistics.median(s[n] for s in steps if n in s) for n in names}
    train_s = median["perf/actor_train_time"]
    rollout_s = median.get("perf/rollout_s", median.get("perf/rollout_time", 0.0))
    compute = sum(median.get(f"perf/{part}_time", 0.0) for part in COMPUTE)
    step_s = median["perf/step_time"]
    return {
        "step_s": step_s,
        "step_s_all": [s["perf/step_time"] for s in steps],
        "rollout_s": rollout_s,
        "of_offline_vllm": limits["generation_s"] / rollout_s,
        "train_s": train_s,
        "mfu": flops / train_s / 1e12 / limits["matmul_tflops"],
        "other_share": 1 - (rollout_s + compute + median["perf/update_weights_time"]) / step_s,
        "tokens": statistics.median(s["rollout/num_tokens"] for s in steps),
        "log_prob_abs_diff": statistics.median(s["train/train_rollout_logprob_abs_diff"] for s in steps),
        "median": median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an HF config.json")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--layout", choices=LAYOUTS, default="colocated")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help=f"{WARM_UP_STEPS} of them warm-up (default: %(default)s)")
    parser.add_argument("--micro-batch-tokens", type=int, help="default: sixteen samples")
    parser.add_argument("--utilization", type=float, default=0.75, help="the engine's share of its device")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: starts sooner, generates slowly")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.flags = words[cut + 1 :]
    config = json.loads(options.config.read_text(encoding="utf-8"))
    if options.num_layers:
        config["num_hidden_layers"] = options.num_layers
    if options.child:
        result = CHILDREN[options.child](options.folder, options, config)
        (options.folder / f"{options.child}.json").write_text(json.dumps(result), encoding="utf-8")
        return
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}")
    from benchmarks.common import say  # imports torch, before which the child that runs vLLM sets its environment

    with tempfile.TemporaryDirectory() as folder:
        limits = child(Path(folder), "prepare", options) | child(Path(folder), "offline", options)
        steps = train(Path(folder), options, config)
        versions = json.loads((Path(folder) / "run" / "versions.json").read_text(encoding="utf-8"))
    shape = {n: getattr(options, n) for n in ("layout", "prompts", "samples", "prompt_len", "response_len", "flags")}
    result = {
        "model": options.config.parent.name,
        "num_layers": config["num_hidden_layers"],
        **shape,
        **figures(steps, limits, family_of(config).settings(config), options),
        "limits": limits,
        "versions": versions,
    }
    say(result, options.out)


if __name__ == "__main__":
    main()
