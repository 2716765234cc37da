"""What step_time.py, rollout.py and the peers are measured on: a model of random weights, and its prompts."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The flags that say how large a rollout is."""
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=1024)
    parser.add_argument("--utilization", type=float, default=0.6, help="the engine's share of its device")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: starts sooner, generates slowly")


def write_model(folder: Path, config: dict[str, Any], device: str = "cuda") -> int:
    """Random weights, and a tokenizer with a word `w<id>` for each id and no end of sequence. Returns: parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.common import write_checkpoint

    size = write_checkpoint(folder, {**config, "eos_token_id": None, "bos_token_id": None}, device=device)
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0").save_pretrained(folder)
    return size


def prompt_ids(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of `length` random ids; seeded, so that fewer are the first of more."""
    rng = random.Random(0)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for _ in range(count)]


def prompt_text(tokens: list[int]) -> str:
    """A prompt as the model's tokenizer reads it."""
    return " ".join(f"w{i}" for i in tokens)


def offline(
    model: Path,
    options: argparse.Namespace,
    platform_name: str = "cuda",
    *,
    repeats: int = 2,
    measure: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """`vllm.LLM.generate` on a step's requests, after a short one, with the arguments that a run's engine gets.

    Sets environment variables that vLLM reads when it is imported. Returns: seconds of each time, response tokens per
    second at the median, the KV cache's tokens, the device's bytes that `measure` gives while the engine is there.
    """
    from vime.platform import get_platform

    platform = get_platform(platform_name)
    os.environ.update(platform.engine_environment())
    from vllm import LLM, SamplingParams

    on_device = platform.device_type == "cuda"
    arguments = {
        **platform.engine_arguments(options.prompt_len + options.response_len),
        "dtype": "bfloat16" if on_device else "float32",
        "max_num_seqs": options.prompts * options.samples,
        "logprobs_mode": "processed_logprobs",
    }
    if on_device:
        arguments |= {"gpu_memory_utilization": options.utilization, "enforce_eager": options.enforce_eager}
    llm = LLM(str(model), **arguments)
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids(options.prompts, options.prompt_len, vocab_size)]

    def sampling(max_tokens: int) -> SamplingParams:
        return SamplingParams(n=options.samples, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False)

    llm.generate(prompts, sampling(8), use_tqdm=False)
    times = []
    for _ in range(repeats):
        llm.reset_prefix_cache()  # a run's prompts are new, and its weights, too
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling(options.response_len), use_tqdm=False)
        times.append(time.perf_counter() - begin)
        print(f"offline vLLM: {times[-1]:.2f} s", flush=True)
    tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cache = llm.llm_engine.vllm_config.cache_config
    seconds = statistics.median(times)
    return {
        "generation_s": seconds,
        "generation_s_all": times,
        "tokens_per_s": tokens / seconds,
        "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "device_bytes": measure() if measure is not None else None,
    }
