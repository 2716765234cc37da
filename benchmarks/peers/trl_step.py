"""A GRPO step of TRL with vLLM in the same process, on the workload of step_time.py: the other half of a comparison.

    python benchmarks/peers/trl_step.py --model w1/model --work trl --out step_time.jsonl

Two processes, one after the other. The first tries SETTINGS on the training half alone: TRL's own trainer gets random
responses of the workload's length from a rollout function, and makes one optimizer step of --trial-samples after one
that is not timed. Then the fastest one whose memory fits beside the engine makes --steps whole steps. As in vime's run:
one optimizer step a rollout, float32 master weights with bf16 arithmetic, no correction of the engine's log-probs (and
so no forward pass for old log-probs), the same share of the device for the engine. Prints a line of JSON, and appends
it to the file --out. Needs trl, and for one of the settings liger-kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import add_shape, prompt_ids, prompt_text  # noqa: E402
from vime.engine.vllm.processes import free_port  # noqa: E402

GIB = 1 << 30
SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointing, 16": {"gradient_checkpointing": True, "per_device_train_batch_size": 16},
    "8": {"gradient_checkpointing": False, "per_device_train_batch_size": 8},
    # Last: Liger's kernels stay in the model's module.
    "liger, 8": {"gradient_checkpointing": False, "per_device_train_batch_size": 8, "use_liger_kernel": True},
}
_BESIDE_GIB = 4.0  # of the device for contexts and what torch has cached in pieces


def reward(completions: list[str], **_: Any) -> list[float]:
    """As step_time.py's."""
    return [random.Random(text).random() for text in completions]


def used_bytes() -> int:
    """Of the whole device."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def make_trainer(
    options: argparse.Namespace, setting: dict[str, Any], samples: int, steps: int, **more: Any
) -> tuple[Any, list[float]]:
    """TRL's trainer for steps of `samples` responses, and the ends of its optimizer steps to come."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.eos_token = "w0"  # TRL wants one; no response ends by it
    vocab_size = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = prompt_ids(samples // options.samples * steps, options.prompt_len, vocab_size)
    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=str(options.work / "output"),
        **setting,
        gradient_accumulation_steps=samples // setting["per_device_train_batch_size"],
        num_generations=options.samples,
        max_completion_length=options.response_len,
        max_steps=steps,
        learning_rate=1e-6,
        bf16=True,
        beta=0.0,
        temperature=1.0,
        loss_type="grpo",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        vllm_importance_sampling_correction=False,
        seed=0,
        **more.pop("config", {}),
    )
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt_text(p)} for p in prompts]),
        processing_class=tokenizer,
        callbacks=[Ends()],
        **more,
    )
    return trainer, ends


def try_setting(options: argparse.Namespace, setting: dict[str, Any]) -> dict[str, float]:
    """Seconds of an optimizer step on --trial-samples, and the trainer's memory. Raises: whatever TRL raises."""
    import torch

    vocab_size = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = random.Random(1)
    began: list[float] = []

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        ids = [[rng.randrange(1, vocab_size) for _ in range(options.response_len)] for _ in prompts]
        torch.cuda.synchronize()
        began.append(time.perf_counter())
        words = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
        return {"prompt_ids": words, "completion_ids": ids, "logprobs": [[-10.0] * options.response_len] * len(ids)}

    torch.cuda.reset_peak_memory_stats()
    trainer, ends = make_trainer(options, setting, options.trial_samples, 2, rollout_func=rollout)
    trainer.train()
    result = {"seconds": ends[-1] - began[-1], "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return result


def trials(options: argparse.Namespace) -> dict[str, Any]:
    """Every setting's figures, or why it has none."""
    results: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        try:
            results[name] = try_setting(options, setting)
        except Exception as error:  # whatever the peer cannot do on this machine
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(f"TRL, {name}: {results[name]}", flush=True)
        (options.work / "trials.json").write_text(json.dumps(results), encoding="utf-8")
    return results


def best_of(results: dict[str, Any], options: argparse.Namespace, device_gib: float) -> str:
    """The fastest setting that fits beside the engine. Raises: SystemExit if none does."""
    room = device_gib * (1 - options.utilization) - _BESIDE_GIB
    fits = {n: r for n, r in results.items() if "error" not in r and r["reserved_gib"] <= room}
    if not fits:
        raise SystemExit(f"no setting of TRL's ran in {room:.0f} GiB: {results}")
    return min(fits, key=lambda name: fits[name]["seconds"])


def timed(work: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """`work`, whose seconds are kept."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = work(*args, **kwargs)
        into.append(time.perf_counter() - begin)
        return result

    return call


def whole_steps(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Steps of one setting. What is known is written after each."""
    from trl.generation import vllm_generation

    from benchmarks.device_watch import DeviceWatch

    make_engine, engine = vllm_generation.LLM, {}

    def start_engine(*args: Any, **kwargs: Any) -> Any:
        before = used_bytes()
        llm = make_engine(*args, **kwargs)
        engine["device_bytes"] = used_bytes() - before
        cache = llm.llm_engine.vllm_config.cache_config
        engine["kv_cache_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
        return llm

    vllm_generation.LLM = start_engine
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.utilization,
        "vllm_max_model_length": options.prompt_len + options.response_len,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
    }
    samples = options.prompts * options.samples
    with DeviceWatch() as watch:
        trainer, ends = make_trainer(options, SETTINGS[name], samples, options.steps, config=settings)
        generation: list[float] = []
        syncs: list[float] = []
        trainer.vllm_generation.generate = timed(trainer.vllm_generation.generate, generation)
        trainer.vllm_generation.sync_weights = timed(trainer.vllm_generation.sync_weights, syncs)

        def report() -> dict[str, Any]:
            steps = [b - a for a, b in zip([begin, *ends], ends, strict=False)]
            peak = watch.peak_bytes - watch.before_bytes
            kept = slice(options.warm_up, None)
            result = {
                "peer": "trl",
                "setting": name,
                "steps": len(steps[kept]),
                "step_s": statistics.median(steps[kept]) if steps[kept] else None,
                "step_s_all": steps,
                "rollout_s": statistics.median(generation[kept]) if generation[kept] else None,
                "weight_sync_s": statistics.median(syncs[kept]) if syncs[kept] else None,
                "engine": engine,
                "peak_bytes": peak,
                "trainer_adds_bytes": peak - engine["device_bytes"],
                "log": trainer.state.log_history[-1:],
            }
            (options.work / "steps.json").write_text(json.dumps(result, default=str), encoding="utf-8")
            return result

        from transformers import TrainerCallback

        class Reports(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                report()
                print(f"TRL, {name}: step {len(ends)} at {ends[-1] - begin:.1f} s", flush=True)

        trainer.add_callback(Reports())
        begin = time.perf_counter()
        trainer.train()
        return report()


def child(task: str, options: argparse.Namespace) -> bool:
    """Run this file for one part, at most --timeout seconds long; whether it ended by itself."""
    command = [sys.executable, *sys.argv, "--child", task]
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    defaults["MASTER_PORT"] = str(free_port())
    environment = {**defaults, **os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    try:
        return subprocess.run(command, env=environment, timeout=options.timeout, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"TRL's {task} took longer than {options.timeout:.0f} s", file=sys.stderr, flush=True)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="that step_time.py --work has written")
    parser.add_argument("--work", type=Path, default=Path("runs/trl_step"), help="for what is known so far")
    add_shape(parser)
    parser.add_argument("--steps", type=int, default=4, help="warm-up included (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps left out (default: %(default)s)")
    parser.add_argument("--trial-samples", type=int, default=64, help="of a trial's step (default: %(default)s)")
    parser.add_argument("--setting", choices=SETTINGS, help="without trials")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of each part (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    parser.add_argument("--child", choices=("trials", "steps"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.child == "trials":
        trials(options)
        return
    import torch

    results: dict[str, Any] = {}
    found = options.work / "trials.json"
    if options.setting is None and options.child is None:
        found.unlink(missing_ok=True)
        child("trials", options)
    if found.exists():
        results = json.loads(found.read_text(encoding="utf-8"))
    device_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    name = options.setting or best_of(results, options, device_gib)
    if options.child == "steps":
        whole_steps(options, name)
        return
    (options.work / "steps.json").unlink(missing_ok=True)
    whole = child("steps", options)
    if not (options.work / "steps.json").exists():
        raise SystemExit("TRL made no step")
    from benchmarks.common import say

    row = json.loads((options.work / "steps.json").read_text(encoding="utf-8"))
    versions = {p: metadata.version(p) for p in ("trl", "vllm", "torch", "transformers", "accelerate")}
    shape = {n: getattr(options, n) for n in ("prompts", "samples", "prompt_len", "response_len", "utilization")}
    say({**row, **shape, "ended_early": not whole, "trials": results, "versions": versions}, options.out)


if __name__ == "__main__":
    main()
