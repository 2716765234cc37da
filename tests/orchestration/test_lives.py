"""Processes that are killed and frozen: stub engines, the real router, a real weight sync and real keepers.

Ray is a stand-in that calls the worker in threads of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray.exceptions import GetTimeoutError

from tests.stub_engine.settings import MODULE, StubSettings
from tests.weight_sync.hf_trainer import HfTrainer
from vime.config import Config, FaultConfig
from vime.engine.vllm import health
from vime.engine.vllm.processes import SERVER_VARIABLE
from vime.errors import EngineDead
from vime.orchestration.engines import EngineFleet
from vime.orchestration.workers import EngineWorker
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.types import VersionSpan
from vime.weight_sync import shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance

pytestmark = pytest.mark.engine  # stubs, which take seconds to start
PROMPT = tuple(range(40, 60))
NUM_TOKENS = 40


class LocalRay:
    """`ray.get`, `ray.wait` and `ray.kill` of futures."""

    def get(self, call: Any, timeout: float | None = None) -> Any:
        try:
            return [one.result() for one in call] if isinstance(call, list) else call.result(timeout)
        except FutureTimeout as error:
            raise GetTimeoutError from error

    def wait(self, calls: Sequence[Any], *, timeout: float | None = None, num_returns: int = 1) -> Any:
        done, pending = wait(calls, timeout=timeout)
        return list(done), list(pending)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "here", "Alive": True}]


class LocalHandle:
    """A Ray handle's calls, on an object of this process."""

    def __init__(self, pool: ThreadPoolExecutor, target: Any) -> None:
        self._pool, self._target = pool, target

    def __getattr__(self, name: str) -> Any:
        class Method:
            def remote(_, *args: Any, **kwargs: Any) -> Future[Any]:
                return self._pool.submit(getattr(self._target, name), *args, **kwargs)

        return Method()


class Serving:
    """A fleet of stub engines with its router, its client and a trainer, kept going."""

    def __init__(self, fleet: EngineFleet, workers: list[EngineWorker], model: Path) -> None:
        self.fleet, self.workers = fleet, workers
        self.client = fleet.wait_ready(300)
        self.trainer = HfTrainer(model, shm.Writer())
        self.lock = threading.RLock()
        self.sync = WeightSync(
            self.trainer,  # type: ignore[arg-type]
            fleet.engines,
            transport="shm",
            probe_prompts=[PROMPT],
            probe_interval=1,
            probe_tolerance=ProbeTolerance(1e-4),
            lock=self.lock,
        )
        self.roster = self.sync.roster = fleet.keep_going(self.client, self.give)
        self.trainer.perturb(1)
        self.sync.publish(7)

    def give(self, number: int) -> None:
        self.sync.join(number, 7)

    def pid(self, number: int) -> int:
        pid: int = self.workers[number]._server.pid
        return pid

    def generate(self, *names: str, beside: Callable[[], None] = lambda: None) -> list[list[Completion]]:
        """The answers to requests of three samples each; `beside` is called when they are under way."""

        async def run() -> list[list[Completion]]:
            asked = [
                asyncio.create_task(
                    self.client.generate(
                        GenerateRequest(
                            request_id=name,
                            token_ids=PROMPT,
                            sampling=SamplingParams(n=3, max_tokens=NUM_TOKENS, seed=i * 1000, ignore_eos=True),
                        )
                    )
                )
                for i, name in enumerate(names)
            ]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(beside)
            try:
                return await asyncio.gather(*asked)
            finally:
                await self.client.aclose()

        return asyncio.run(run())


def make_fleet(
    num_engines: int, model: Path, key: str, folder: Path, pool: ThreadPoolExecutor, fault: FaultConfig
) -> Any:
    """An `EngineFleet` that a run would have built, without a cluster."""
    workers = [EngineWorker() for _ in range(num_engines)]
    hf_config = json.loads((model / "config.json").read_text())
    fleet = object.__new__(EngineFleet)
    super(EngineFleet, fleet).__init__(Config(fault=fault), key=key, log_dir=folder, hf_config=hf_config)

    class Node:
        node_id = "here"

    class Layout:
        engine_devices = tuple((number,) for number in range(num_engines))

    class Placement:
        layout, nodes = Layout, [Node] * num_engines

    fleet._placement = Placement  # type: ignore[assignment]
    fleet._workers = [LocalHandle(pool, worker) for worker in workers]
    fleet._make_worker = lambda number: fleet._workers[number]
    stub = StubSettings(token_s=0.05)
    fleet._start_with = [
        dict(
            model=str(model),
            arguments={"max_model_len": 512, "dtype": "float32", "max_num_seqs": 64},
            environment={SERVER_VARIABLE: MODULE, **stub.to_environment()},
            key=key,
            log_path=folder / f"engine_{number}.log",
        )
        for number in range(num_engines)
    ]
    fleet._starts = [w.start.remote(**how) for w, how in zip(fleet._workers, fleet._start_with, strict=True)]
    return fleet, workers


@pytest.fixture
def serve(
    tiny_qwen3: Path, run_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Serving]]:
    local = LocalRay()
    for name in ("get", "wait", "nodes"):
        monkeypatch.setattr(ray, name, getattr(local, name))
    monkeypatch.setattr(health, "_STOPPED_S", 1.0)
    pool, fleets = ThreadPoolExecutor(16), []

    def start(num_engines: int, **fault: Any) -> Serving:
        settings = FaultConfig(rollout_health_check_interval=0.5, rollout_restart_backoff_s=0.1, **fault)
        fleet, workers = make_fleet(num_engines, tiny_qwen3, run_key, tmp_path, pool, settings)
        fleets.append(fleet)
        return Serving(fleet, workers, tiny_qwen3)

    yield start
    for fleet in fleets:
        fleet.close()
    pool.shutdown()


def check(answers: list[list[Completion]], expected: list[list[Completion]]) -> None:
    """Every sample once, whole, and the same as without a failure: of the same seed and the same weights."""
    assert [[c.token_ids for c in answer] for answer in answers] == [[c.token_ids for c in one] for one in expected]
    for completion in (c for answer in answers for c in answer):
        assert completion.weight_versions == (VersionSpan(7, 0, NUM_TOKENS),)


def test_requests_outlive_the_only_engine_the_router_and_a_freeze(serve: Callable[..., Serving]) -> None:
    serving = serve(1)
    names = ["a", "b", "c", "d"]
    expected = serving.generate(*names)
    check(serving.generate(*names, beside=lambda: os.kill(serving.pid(0), signal.SIGKILL)), expected)
    router = serving.fleet._front.router  # type: ignore[union-attr]
    check(serving.generate(*names, beside=lambda: os.kill(router.pid or 0, signal.SIGKILL)), expected)
    check(serving.generate(*names, beside=lambda: os.kill(serving.pid(0), signal.SIGSTOP)), expected)
    assert serving.roster is not None
    assert serving.roster.restarts == {"engine": 2, "router": 1}
    spans = serving.fleet.take_spans()[0]
    assert [span["name"] for span in spans].count("restart") == 2
    assert "router restart" in {span["name"] for span in spans}


def test_a_sync_goes_on_without_the_engine_that_dies_in_it_which_then_joins(
    serve: Callable[..., Serving], run_key: str
) -> None:
    serving = serve(2)
    engine = serving.fleet.engines[1]
    receive = engine.receive

    def die(bucket: Any) -> None:
        os.kill(serving.pid(1), signal.SIGKILL)
        receive(bucket)

    engine.receive = die  # type: ignore[method-assign]
    serving.sync.publish(7)
    del engine.receive
    assert serving.roster is not None
    with serving.roster._changed:
        assert serving.roster._changed.wait_for(lambda: len(serving.roster.serving()) == 2, timeout=300)  # type: ignore[union-attr]
    one, other = (engine.probe([PROMPT], 8) for engine in serving.fleet.engines)
    assert one.completions[0].token_ids == other.completions[0].token_ids
    assert other.completions[0].weight_versions == (VersionSpan(7, 0, 8),)
    router = serving.fleet._front.router  # type: ignore[union-attr]
    listed = httpx.get(f"{router.url}/workers", headers={"Authorization": f"Bearer {run_key}"}, trust_env=False).json()
    assert {worker["url"] for worker in listed["workers"]} == {engine.url for engine in serving.fleet.engines}


def test_an_engine_that_cannot_be_started_again_ends_the_run_with_the_cause(serve: Callable[..., Serving]) -> None:
    serving = serve(1, rollout_max_restarts=1)
    serving.fleet._start_with[0]["environment"] = {SERVER_VARIABLE: "no_such_module"}

    with pytest.raises(EngineDead, match=r"(?s)engine 0 failed .*1 restarts within .*no_such_module"):
        serving.generate("a", beside=lambda: os.kill(serving.pid(0), signal.SIGKILL))
    with pytest.raises(EngineDead, match="is not started again"):
        serving.fleet.check_alive()
    with pytest.raises(EngineDead, match="is not started again"):
        serving.sync.publish(8)
