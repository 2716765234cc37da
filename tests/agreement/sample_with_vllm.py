"""Samples from several models in one process: python -m tests.agreement.sample_with_vllm JOBS.json OUT.json

Each model gets a vLLM of its own, one after the other, with the arguments vime starts its CPU engines with. A process
that imports vLLM once is several times cheaper than a server per model. The environment must be an engine's.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from vime.config.dtype import stored_dtype
from vime.platform.cpu import CpuPlatform


def sample(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One {"prompt", "tokens", "log_probs"} per sampled sequence."""
    config = json.loads((Path(job["model"]) / "config.json").read_text())
    llm = LLM(
        job["model"],
        **{**CpuPlatform().engine_arguments(256), "dtype": stored_dtype(config), "max_num_seqs": 64, "seed": 0},
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=job["temperature"],
        n=job["n"],
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_token_ids"],
        logprobs=0,
        detokenize=False,
    )
    answers = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    samples = []
    for answer in answers:
        for out in answer.outputs:
            assert out.logprobs is not None
            log_probs = [entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids, strict=True)]
            samples.append({"prompt": answer.prompt_token_ids, "tokens": list(out.token_ids), "log_probs": log_probs})
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return samples


def main() -> None:
    """Run every job; the answers are in the jobs' order."""
    jobs, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps([sample(job) for job in json.loads(jobs.read_text())]))


if __name__ == "__main__":
    main()
