"""What a rollout costs the CPU around the engine: the server's answers, and what becomes of them in the driver.

    python benchmarks/answer_cost.py --out answer_cost.jsonl

Stub answers of the engine go through vLLM's own serving method to JSON, with log-probs as vLLM writes them and as
vime's servers do (vime/engine/vllm/short_answers.py); then through the client, samples and their text, the training
batch and the rollout's file. Seconds of CPU for a whole rollout, each part on one thread; the last of three rounds, for
modules load and caches fill in the first. Needs vLLM, and no device. Prints a line of JSON for each kind of answer, and
appends them to the file --out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import say  # noqa: E402
from vime.engine.vllm import short_answers  # noqa: E402
from vime.engine.vllm.versions import adapter_for, installed_vllm_version  # noqa: E402

VOCABULARY = 151_936


class Clock:
    """Seconds of CPU by part, of this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, part: str, work: Callable[[], Any]) -> Any:
        """What `work` returns."""
        begin = time.process_time()
        result = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - begin
        return result


def engine_output(options: argparse.Namespace, rng: random.Random) -> Any:
    """What vLLM's engine gives its server for one request."""
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    outputs = []
    for index in range(options.samples):
        ids = [rng.randrange(VOCABULARY) for _ in range(options.response_len)]
        kept = create_sample_logprobs(True)
        for token in ids:
            append_logprobs_for_next_position(kept, [token], [-12 * rng.random()], [None], 1, 0)
        outputs.append(CompletionOutput(index, "", ids, None, kept, finish_reason="length"))
    return RequestOutput("r", None, [1] * options.prompt_len, None, outputs, True)


def answer(output: Any, options: argparse.Namespace, method: Any) -> bytes:
    """The body that the server sends."""
    from vllm import SamplingParams
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    async def results() -> AsyncIterator[Any]:
        yield output

    sampling = SamplingParams(n=options.samples, logprobs=0)
    request = GenerateRequest(token_ids=[1] * options.prompt_len, sampling_params=sampling)
    server = ServingTokens.__new__(ServingTokens)
    server.enable_prompt_tokens_details = server.enable_log_outputs = server.has_tokenizer = False
    server.request_logger = None
    response = asyncio.run(method(server, request, results(), "r", "policy", SimpleNamespace()))
    return json.dumps(response.model_dump(), separators=(",", ":")).encode()


def rollout(options: argparse.Namespace, method: Any, tokenizer: Any, folder: Path) -> tuple[dict[str, float], int]:
    """Seconds by part of one rollout, and the bytes of one answer."""
    from vime.config import AlgoConfig, TrainConfig
    from vime.engine.vllm.answers import parse_completions
    from vime.loop.batch import make_train_batch
    from vime.observability.rollout_file import write_rollout
    from vime.protocols import GenerateRequest, SamplingParams
    from vime.rollout.generate import apply_completion
    from vime.types import Group, Sample

    adapter = replace(adapter_for(), reports_version_spans=False)  # the stub's answers are of one version
    clock, rng, groups = Clock(), random.Random(0), []
    prompt = tuple(range(options.prompt_len))
    request = GenerateRequest(request_id="r", token_ids=prompt, sampling=SamplingParams(n=options.samples))
    for g in range(options.prompts):
        output = engine_output(options, rng)
        body = clock.time("server", lambda output=output: answer(output, options, method))
        parsed = clock.time("json", lambda body=body: json.loads(body))
        completions = clock.time("parse", lambda parsed=parsed: parse_completions(parsed, request, adapter, 1))
        for choice in parsed["choices"]:
            ids = choice["token_ids"]
            clock.time("text, part of samples", lambda ids=ids: tokenizer.decode(ids, skip_special_tokens=True))
        samples = []
        for i, completion in enumerate(completions):
            number = g * options.samples + i
            sample = Sample(tokens=prompt, group_id=g, sample_id=number, trajectory_id=number, reward=rng.random())
            clock.time(
                "samples",
                lambda s=sample, c=completion: apply_completion(s, c, tokenizer, skip_special_tokens=True),
            )
            samples.append(sample)
        groups.append(Group(g, samples))
    size = len(prompt) + options.response_len
    train = TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=16 * size)
    clock.time(
        "training batch",
        lambda: make_train_batch(
            groups,
            rollout_id=0,
            algo=AlgoConfig(),
            train=train,
            dp_size=1,
            reward_key=None,
            global_batch_size=options.prompts * options.samples,
        ),
    )
    clock.time("file, beside the training", lambda: write_rollout(folder / "rollout.parquet", 0, groups))
    return clock.seconds, len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    own = ServingTokens.serve_tokens_full_generator
    gc.freeze()  # as vLLM's server does when it has started
    with tempfile.TemporaryDirectory() as folder:
        for name, method in (("vllm", own), ("short", short_answers.shortened(own))):
            for _ in range(3):
                seconds, num_bytes = rollout(options, method, tokenizer, Path(folder))
            shape = {n: getattr(options, n) for n in ("prompts", "samples", "prompt_len", "response_len")}
            row = {"answers": name, **shape, "cpu_s": seconds, "answer_bytes": num_bytes}
            say({**row, "vllm": installed_vllm_version(), "python": sys.version.split()[0]}, options.out)


if __name__ == "__main__":
    main()
