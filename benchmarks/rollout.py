"""A rollout's tokens per second through router and HTTP, beside offline vLLM with the same arguments.

    python benchmarks/rollout.py scripts/models/qwen3-0.6b/config.json --concurrency 16 64 --out rollout.jsonl
    python benchmarks/rollout.py CONFIG --platform cpu --prompts 8 --samples 4 --response-len 64

A model of the shape that an HF config.json says, with random weights, generates responses of exactly --response-len
tokens: first by `vllm.LLM.generate` in a process of its own, then by vime's rollout function through a router to a
server, as in a run, with --concurrency requests in flight (a request is a prompt with all its samples). Each twice;
the better one counts. Beside it the seconds of CPU that the server's HTTP process, the router and the client took: as
long as each is well below the wall time, one front end is enough. Prints a line of JSON for each concurrency, and
appends them to the file --out.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import add_shape, offline, prompt_ids, prompt_text, write_model  # noqa: E402
from vime.platform import get_platform  # noqa: E402

REPEATS = 2


def child(folder: Path, options: argparse.Namespace, task: str) -> None:
    """`--child task` in a process of its own, which leaves nothing on the device."""
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--child", task, "--folder", str(folder)]
    subprocess.run(command, check=True, timeout=options.timeout)


def cpu_seconds(pid: int) -> float:
    """That a process alone has taken."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def start_server(folder: Path, options: argparse.Namespace, key: str) -> Any:
    """An engine as a run starts it."""
    from vime.engine.vllm.server import EngineServer

    platform = get_platform(options.platform)
    arguments = {
        **platform.engine_arguments(options.prompt_len + options.response_len),
        "dtype": "bfloat16" if platform.device_type == "cuda" else "float32",
        "max_num_seqs": options.prompts * options.samples,
    }
    if platform.device_type == "cuda":
        arguments |= {"gpu_memory_utilization": options.utilization, "enforce_eager": options.enforce_eager}
    server = EngineServer(
        str(folder / "model"),
        arguments=arguments,
        environment=platform.engine_environment(),
        key=key,
        log_path=folder / "engine.log",
    )
    server.start()
    return server


def rollouts(options: argparse.Namespace, folder: Path, client: Any, pids: dict[str, int], concurrency: int) -> Any:
    """The figures of one concurrency."""
    from transformers import AutoTokenizer

    from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
    from vime.data.buffer import DataBuffer
    from vime.data.prompt_set import Prompt
    from vime.protocols import RolloutContext
    from vime.rewards.pool import GraderPool
    from vime.rewards.score import make_reward_function
    from vime.rollout.vllm_rollout import generate_rollout

    config = Config(
        data=DataConfig(rollout_seed=concurrency),
        rollout=RolloutConfig(
            rollout_batch_size=options.prompts,
            n_samples_per_prompt=options.samples,
            rollout_max_response_len=options.response_len,
            rollout_concurrency=concurrency,
        ),
        reward=RewardConfig(custom_rm_path="benchmarks.step_time.reward"),
    )
    vocab_size = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = prompt_ids(options.prompts * REPEATS, options.prompt_len, vocab_size)
    prompts = [Prompt(prompt_text(tokens), tuple(tokens)) for tokens in ids]
    source = DataBuffer(prompts, n_samples_per_prompt=options.samples, shuffle=False, seed=0)
    pool = GraderPool(1, 60.0, 1 << 30)
    context = RolloutContext(
        config, client, AutoTokenizer.from_pretrained(folder / "model"), make_reward_function(config.reward, pool)
    )
    runs = []
    for repeat in range(REPEATS):
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        begin = time.perf_counter()
        result = generate_rollout(context, repeat, source, client)
        seconds = time.perf_counter() - begin
        taken = {f"{name}_cpu_s": cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        tokens = sum(sample.response_length for group in result.groups for sample in group.samples)
        runs.append({"seconds": seconds, "tokens_per_s": tokens / seconds, **taken})
    pool.close()
    best = min(runs, key=lambda run: run["seconds"])
    return {"concurrency": concurrency, **best, "seconds_all": [run["seconds"] for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an HF config.json")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--platform", default="cuda")
    add_shape(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", help="requests in flight; default: all at once")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of each part (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--child", choices=("prepare", "offline"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    platform = get_platform(options.platform)
    if options.child == "prepare":
        config = json.loads(options.config.read_text(encoding="utf-8"))
        if options.num_layers:
            config["num_hidden_layers"] = options.num_layers
        write_model(options.folder / "model", config, platform.device_type)
        return
    if options.child == "offline":
        figures = offline(options.folder / "model", options, options.platform)
        (options.folder / "offline.json").write_text(json.dumps(figures), encoding="utf-8")
        return
    from vime.engine.vllm.client import RouterClient
    from vime.engine.vllm.router import RouterProcess
    from vime.engine.vllm.versions import installed_vllm_version

    with tempfile.TemporaryDirectory() as scratch:
        folder, key = Path(scratch), secrets.token_hex(16)
        child(folder, options, "prepare")
        child(folder, options, "offline")
        limit = json.loads((folder / "offline.json").read_text(encoding="utf-8"))
        server = start_server(folder, options, key)
        router = None
        try:
            server.wait_ready(options.timeout)
            router = RouterProcess([server.url], settings={}, key=key, log_path=folder / "router.log")
            router.start()
            router.wait_ready()
            client = RouterClient(router.url, [server.url], key)
            client.note_version(0)
            pids = {"server": server.pid, "router": router.pid, "client": os.getpid()}
            from benchmarks.common import say

            for concurrency in options.concurrency or [options.prompts]:
                row = {
                    "model": options.config.parent.name,
                    **{n: getattr(options, n) for n in ("prompts", "samples", "prompt_len", "response_len")},
                    **rollouts(options, folder, client, pids, concurrency),
                    "offline": limit,
                    "vllm": installed_vllm_version(),
                    "platform": options.platform,
                }
                row["of_offline_vllm"] = (
                    row["tokens_per_s"]
                    * min(limit["generation_s_all"])
                    / (options.prompts * options.samples * options.response_len)
                )
                say(row, options.out)
        finally:
            if router is not None:
                router.stop()
            server.stop()


if __name__ == "__main__":
    main()
