"""The data buffer and the rollout under load: many prompts, many samples in flight, ever larger data sets.

    python -m benchmarks.load [--prompts 100000] [--in-flight 10000] [--rows 100000 1000000 10000000] [--out FILE]

Everything between the prompts and the trainer is what a run has: data buffer, rollout function, rewards, HTTP client,
vllm-router; the engines are stubs (tests/stub_engine) that answer with random tokens at a set speed. Two parts:
  flight  --prompts prompts in rollouts of --batch, --in-flight samples in flight: throughput, latency, memory of each
          process after each rollout. Fails where the driver or the router grows from rollout to rollout.
  rows    the same path over data sets of each size of --rows, whose rows are made when they are asked for, and the
          reading of a real file of --file-rows. Fails where a sample costs more with the largest set.
Costs are processor seconds of this process, so that a busy machine does not change them much. Prints a line of JSON for
each rollout, and what was missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import say
from benchmarks.generated_rows import KEYS, generated_prompts
from tests.fakes import char_tokenizer
from tests.stub_engine.settings import MODULE, StubSettings
from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.journal import Journal
from vime.data.journaled import JournaledSource
from vime.data.prompt_set import PromptSet
from vime.data.prompts import check_rows
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.processes import SERVER_VARIABLE
from vime.engine.vllm.router import RouterProcess
from vime.engine.vllm.server import EngineServer
from vime.protocols import RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.score import make_reward_function
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import Group

KEY = "the-key-of-the-benchmark"
MAX_RESPONSE = 32
MAX_GROWTH = 1.10  # of a process, from the second rollout to the last
MAX_COST_RATIO = 1.25  # of a sample, with the largest data set against the smallest
_DRAWS = 5_000


class Bench:
    """Stubs, the router and a client; what a run has around its rollout function.

    Args:
        samples: of a prompt.
        in_flight: samples under way at a time.
        token_s: of the stubs, between two tokens.
    """

    def __init__(self, stack: ExitStack, *, stubs: int, samples: int, in_flight: int, batch: int, token_s: float):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-load-")))
        self._folder, self._stack, self._journals = folder, stack, itertools.count()
        self.tokenizer = char_tokenizer()
        settings = StubSettings(brain="dice", token_s=token_s, tokens_per_step=MAX_RESPONSE)
        self._engines = [self._engine(folder, number, settings) for number in range(stubs)]
        for engine in self._engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in self._engines:
            engine.wait_ready(300)
        urls = [engine.url for engine in self._engines]
        self._router = RouterProcess(urls, settings={}, key=KEY, log_path=folder / "router.log")
        stack.callback(self._router.stop)
        self._router.start()
        self._router.wait_ready()
        self.config = Config(
            data=DataConfig(rollout_seed=0),
            rollout=RolloutConfig(
                rollout_batch_size=batch,
                n_samples_per_prompt=samples,
                rollout_max_response_len=MAX_RESPONSE,
                rollout_concurrency=max(1, in_flight // samples),
            ),
            reward=RewardConfig(rm_type="exact_match"),
        )
        pool = GraderPool()
        stack.callback(pool.close)
        self.client = RouterClient(self._router.url, urls, KEY, max_connections=self.config.rollout.rollout_concurrency)
        reward = make_reward_function(self.config.reward, pool)
        self.context = RolloutContext(self.config, self.client, self.tokenizer, reward)

    def _engine(self, folder: Path, number: int, settings: StubSettings) -> EngineServer:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        eos = self.tokenizer.eos_token_id
        (model / "config.json").write_text(
            json.dumps({"vocab_size": len(self.tokenizer), "eos_token_id": eos, "num_hidden_layers": 1})
        )
        return EngineServer(
            str(model),
            arguments={"max_model_len": 1024},
            environment={SERVER_VARIABLE: MODULE, **settings.to_environment()},
            key=KEY,
            log_path=folder / f"engine_{number}.log",
        )

    def source(self, prompts: PromptSet) -> JournaledSource:
        """The data buffer over these prompts, shuffled, with its journal."""
        samples = self.config.rollout.n_samples_per_prompt
        journal = Journal(self._folder / f"journal_{next(self._journals)}.sqlite")
        self._stack.callback(journal.close)
        source = DataBuffer(prompts, n_samples_per_prompt=samples, shuffle=True, seed=0)
        return JournaledSource(source, journal, version=1, uses_finished=True)

    def memory(self) -> dict[str, int]:
        """Resident bytes of this process, the router and its validator, and all stubs."""
        found = {"driver": psutil.Process().memory_info().rss}
        for name, pids in (("router", [self._router.pid]), ("stubs", [engine.pid for engine in self._engines])):
            processes = [psutil.Process(pid) for pid in pids if pid is not None]
            family = [p for process in processes for p in (process, *process.children(recursive=True))]
            found[name] = sum(p.memory_info().rss for p in family)
        return found


def flight(bench: Bench, num_prompts: int, out: Path | None) -> list[str]:
    """Rollouts over `num_prompts` prompts. Returns: what was missed."""
    source = bench.source(generated_prompts(num_prompts, bench.tokenizer))
    batch = bench.config.rollout.rollout_batch_size
    records = []
    for rollout_id in range(num_prompts // batch):
        record = {"part": "flight", "rollout": rollout_id, **one_rollout(bench, source, rollout_id)}
        records.append(record)
        say(record, out)
    missed = []
    for process in ("driver", "router", "stubs"):
        sizes = [record["memory_bytes"][process] for record in records]
        if len(sizes) > 2 and sizes[-1] > MAX_GROWTH * sizes[1]:
            missed.append(
                f"memory of {process}: {sizes[1] / 2**20:.0f} MiB after two rollouts, then {sizes[-1] / 2**20:.0f}"
            )
    return missed


def one_rollout(bench: Bench, source: JournaledSource, rollout_id: int) -> dict[str, Any]:
    """Figures of one rollout; its samples are dropped, as after a training step."""
    begin, cpu = time.monotonic(), time.process_time()
    source.begin_rollout(bench.context, rollout_id)
    result = generate_rollout(bench.context, rollout_id, source, bench.client)
    source.trained(rollout_id, result.groups)
    seconds, cpu_s = time.monotonic() - begin, time.process_time() - cpu
    count = sum(len(group.samples) for group in result.groups)
    spans = list(_generation(result.groups))
    latency = np.percentile([end - start for start, end in spans], [50, 99])
    figures = {
        "prompts": len(result.groups),
        "samples": count,
        "seconds": round(seconds, 2),
        "samples_per_s": round(count / seconds, 1),
        "driver_cpu_us_per_sample": round(1e6 * cpu_s / count, 1),
        "latency_s": {"p50": round(float(latency[0]), 3), "p99": round(float(latency[1]), 3)},
        "most_in_flight": most_at_once(spans) * bench.config.rollout.n_samples_per_prompt,
        "retries": bench.client.counters["retries"],
    }
    del result, spans
    gc.collect()
    return {**figures, "memory_bytes": bench.memory()}


def _generation(groups: Sequence[Group]) -> Iterator[tuple[float, float]]:
    """Begin and end of each group's request."""
    for group in groups:
        for span in group.samples[0].trace:
            if span["name"] == "generate":
                yield span["start_s"], span["end_s"]


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """How many of the spans overlap at most."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def rows(bench: Bench, sizes: Sequence[int], out: Path | None) -> list[str]:
    """The cost of a sample by size of the data set. Returns: what was missed."""
    costs: dict[str, dict[int, float]] = {"draw": {}, "sample": {}}
    one_rollout(bench, bench.source(generated_prompts(min(sizes), bench.tokenizer)), 0)  # warms up
    for size in sizes:
        gc.collect()
        before = psutil.Process().memory_info().rss
        source = bench.source(generated_prompts(size, bench.tokenizer))
        with cpu_seconds() as epoch:
            source.dropped(source.get_groups(1), "drawn alone")  # shuffles
        with cpu_seconds() as draws:
            drawn = [group for _ in range(_DRAWS) for group in source.get_groups(1)]
        source.dropped(drawn, "drawn alone")
        with cpu_seconds() as first_state:
            source.state()
        with cpu_seconds() as state:
            source.state()
        held = psutil.Process().memory_info().rss - before
        figures = one_rollout(bench, source, 1)
        costs["draw"][size] = 1e6 * draws[0] / _DRAWS
        costs["sample"][size] = figures["driver_cpu_us_per_sample"]
        record = {
            "part": "rows",
            "rows": size,
            "draw_us": round(costs["draw"][size], 2),
            "sample_us": costs["sample"][size],
            "shuffle_s": round(epoch[0], 3),
            "first_state_s": round(first_state[0], 3),
            "state_ms": round(1e3 * state[0], 3),
            "bytes_per_row": round(held / size, 1),
        }
        say(record, out)
        del source
    smallest, largest = min(sizes), max(sizes)
    return [
        f"a {what} costs {cost[largest]:.1f} us with {largest} rows, {cost[smallest]:.1f} with {smallest}"
        for what, cost in costs.items()
        if cost[largest] > MAX_COST_RATIO * cost[smallest]
    ]


def read_file(num_rows: int, tokenizer: Any, out: Path | None) -> None:
    """What a real file of so many rows costs at the start of a run, in parts."""
    with tempfile.TemporaryDirectory(prefix="vime-load-") as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f'{{"input": "{i:08d}=", "label": "{i % 10}"}}\n' for i in range(num_rows))
        before = psutil.Process().memory_info().rss
        with cpu_seconds() as check:
            checked = check_rows([str(path)], KEYS)
        with cpu_seconds() as tokenise:
            prompts = checked.tokenise(tokenizer)
        held = psutil.Process().memory_info().rss - before
        chosen = np.random.default_rng(0).integers(0, num_rows, _DRAWS)
        with cpu_seconds() as reading:
            for index in chosen.tolist():
                prompts[index]
    record = {
        "part": "file",
        "rows": num_rows,
        "check_us_per_row": round(1e6 * check[0] / num_rows, 2),
        "tokenise_us_per_row": round(1e6 * tokenise[0] / num_rows, 2),
        "read_us_per_row": round(1e6 * reading[0] / _DRAWS, 2),
        "bytes_per_row": round(held / num_rows, 1),
    }
    say(record, out)


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """A list that holds the processor seconds spent inside, afterwards."""
    spent: list[float] = []
    begin = time.process_time()
    yield spent
    spent.append(time.process_time() - begin)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=10_000, help="prompts of a rollout")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--in-flight", type=int, default=10_000, help="samples under way at a time")
    parser.add_argument("--stubs", type=int, default=2)
    parser.add_argument("--token-s", type=float, default=0.2, help="between two tokens of a stub")
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--rows-batch", type=int, default=5_000, help="prompts of a rollout of the part rows")
    parser.add_argument("--file-rows", type=int, default=200_000)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    missed: list[str] = []
    speed = {"stubs": options.stubs, "samples": options.samples, "in_flight": options.in_flight}
    if options.prompts:
        with ExitStack() as stack:
            bench = Bench(stack, batch=options.batch, token_s=options.token_s, **speed)
            missed += flight(bench, options.prompts, options.out)
    if options.rows:
        with ExitStack() as stack:
            bench = Bench(stack, batch=options.rows_batch, token_s=0.0, **speed)
            missed += rows(bench, options.rows, options.out)
    if options.file_rows:
        read_file(options.file_rows, char_tokenizer(), options.out)
    say({"missed": missed}, options.out)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
