"""Processes that are killed and frozen: stub engines, or vLLM's, the real router, a real weight sync and real keepers.

Ray is a stand-in that calls the worker in threads of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from tests.stub_engine.settings import MODULE, StubSettings
from tests.weight_sync.hf_trainer import HfTrainer
from vime.config import Config, FaultConfig, LogConfig
from vime.engine.vllm import health
from vime.engine.vllm.processes import SERVER_VARIABLE
from vime.errors import EngineDead
from vime.orchestration.engines import EngineFleet
from vime.orchestration.workers import EngineWorker
from vime.platform.cpu import CpuPlatform
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.types import VersionSpan
from vime.weight_sync import shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance

pytestmark = pytest.mark.engine  # stubs, which take seconds to start
PROMPT = tuple(range(40, 60))
NUM_TOKENS = 40


class LocalRay:
    """`ray.get`, `ray.wait`, `ray.kill` and `ray.nodes` of futures, and of nodes that a test lets leave."""

    def __init__(self) -> None:
        self.gone: set[str] = set()

    def kill(self, handle: Any) -> None:
        pass

    def get(self, call: Any, timeout: float | None = None) -> Any:
        try:
            return [one.result() for one in call] if isinstance(call, list) else call.result(timeout)
        except FutureTimeout as error:
            raise GetTimeoutError from error

    def wait(self, calls: Sequence[Any], *, timeout: float | None = None, num_returns: int = 1) -> Any:
        done, pending = wait(calls, timeout=timeout)
        return list(done), list(pending)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": name not in self.gone} for name in ("node 0", "node 1")]


class LocalHandle:
    """A Ray handle's calls, on an object of this process. Args: is_gone: whether its node is."""

    def __init__(self, pool: ThreadPoolExecutor, target: Any, is_gone: Callable[[], bool]) -> None:
        self._pool, self._target, self._is_gone = pool, target, is_gone

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = None if self._is_gone() else getattr(self._target, name)(*args, **kwargs)
            if self._is_gone():
                raise RayActorError
            return result

        class Method:
            def remote(_, *args: Any, **kwargs: Any) -> Future[Any]:
                return self._pool.submit(call, *args, **kwargs)

        return Method()


class Serving:
    """A fleet of stub engines with its router, its client and a trainer, kept going."""

    def __init__(self, fleet: EngineFleet, workers: list[EngineWorker], model: Path, local: LocalRay) -> None:
        self.fleet, self.workers, self.local = fleet, workers, local
        self.client = fleet.wait_ready(3000)
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

    def generate(
        self, *names: str, beside: Callable[[], None] = lambda: None, num_tokens: int = NUM_TOKENS
    ) -> list[list[Completion]]:
        """The answers to requests of three samples each; `beside` is called when they are under way."""

        async def run() -> list[list[Completion]]:
            asked = [
                asyncio.create_task(
                    self.client.generate(
                        GenerateRequest(
                            request_id=name,
                            token_ids=PROMPT,
                            sampling=SamplingParams(n=3, max_tokens=num_tokens, seed=i * 1000, ignore_eos=True),
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
    num_engines: int,
    model: Path,
    key: str,
    folder: Path,
    pool: ThreadPoolExecutor,
    local: LocalRay,
    fault: FaultConfig,
    *,
    by_vllm: bool = False,
) -> Any:
    """An `EngineFleet` that a run would have built, without a cluster. Args: by_vllm: and no stubs."""
    workers = [EngineWorker() for _ in range(num_engines)]
    hf_config = json.loads((model / "config.json").read_text())
    fleet = object.__new__(EngineFleet)
    super(EngineFleet, fleet).__init__(
        Config(fault=fault, log=LogConfig(engine_start_timeout_s=3000.0)), key=key, log_dir=folder, hf_config=hf_config
    )

    class Node:
        def __init__(self, number: int) -> None:
            self.node_id = f"node {number}"

    class Layout:
        engine_devices = tuple((number,) for number in range(num_engines))

    class Placement:
        layout, nodes = Layout, [Node(number) for number in range(num_engines)]

    fleet._placement = Placement  # type: ignore[assignment]
    fleet._workers = [
        LocalHandle(pool, worker, lambda node=f"node {number}": node in local.gone)  # type: ignore[misc]
        for number, worker in enumerate(workers)
    ]
    fleet._make_worker = lambda number: fleet._workers[number]
    environment = {SERVER_VARIABLE: MODULE, **StubSettings(token_s=0.05).to_environment()}
    arguments = {"max_model_len": 512}
    if by_vllm:
        environment, arguments = CpuPlatform().engine_environment(), CpuPlatform().engine_arguments(512)
    fleet._start_with = [
        dict(
            model=str(model),
            arguments={**arguments, "dtype": "float32", "max_num_seqs": 64},
            environment=environment,
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
    for name in ("get", "wait", "nodes", "kill"):
        monkeypatch.setattr(ray, name, getattr(local, name))
    monkeypatch.setattr(health, "_STOPPED_S", 1.0)
    pool, fleets = ThreadPoolExecutor(16), []

    def start(num_engines: int, *, by_vllm: bool = False, **fault: Any) -> Serving:
        interval_s = FaultConfig().rollout_health_check_interval if by_vllm else 0.5
        settings = FaultConfig(rollout_health_check_interval=interval_s, rollout_restart_backoff_s=0.1, **fault)
        fleet, workers = make_fleet(num_engines, tiny_qwen3, run_key, tmp_path, pool, local, settings, by_vllm=by_vllm)
        fleets.append(fleet)
        return Serving(fleet, workers, tiny_qwen3, local)

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


@pytest.mark.slow
def test_requests_of_a_node_that_goes_silent_are_sent_again_to_the_others(serve: Callable[..., Serving]) -> None:
    """Nobody closes the connections to it, nor its engine's."""
    serving = serve(2)
    names = ["a", "b", "c", "d"]
    expected = serving.generate(*names)
    silent = serving.pid(1)

    def leave() -> None:
        os.killpg(silent, signal.SIGSTOP)
        serving.local.gone.add("node 1")

    try:
        check(serving.generate(*names, beside=leave), expected)
        roster = serving.roster
        assert roster is not None and roster.serving() == [0]
        with roster._changed:  # the requests may all have been the other engine's, and be answered before
            assert roster._changed.wait_for(lambda: roster.restarts == {"router": 1}, timeout=300)
        serving.sync.publish(8)
        stats = serving.fleet.stats()
        assert stats is not None and [engine.num_requests > 0 for engine in stats] == [True, False]
    finally:
        os.killpg(silent, signal.SIGKILL)


def test_an_engine_that_cannot_be_started_again_ends_the_run_with_the_cause(serve: Callable[..., Serving]) -> None:
    serving = serve(1, rollout_max_restarts=1)
    serving.fleet._start_with[0]["environment"] = {SERVER_VARIABLE: "no_such_module"}

    with pytest.raises(EngineDead, match=r"(?s)engine 0 failed .*1 restarts within .*no_such_module"):
        serving.generate("a", beside=lambda: os.kill(serving.pid(0), signal.SIGKILL))
    with pytest.raises(EngineDead, match="is not started again"):
        serving.fleet.check_alive()
    with pytest.raises(EngineDead, match="is not started again"):
        serving.sync.publish(8)


class VllmEnds:
    """The engine core of a vLLM server, killed as the kernel kills what has eaten the memory; the server stays."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._restarts = 0

    def find(self) -> psutil.Process:
        server = psutil.Process(self._serving.pid(0))
        (core,) = [child for child in server.children(recursive=True) if "EngineCore" in child.name()]
        self.began = time.monotonic()
        return core

    def kill(self) -> None:
        self.find().kill()

    def refuse_memory(self) -> None:
        core = self.find()
        # Less than it has: with just that, what was freed before may be enough.
        core.rlimit(psutil.RLIMIT_AS, (core.memory_info().vms // 2, psutil.RLIM_INFINITY))

    def wait(self) -> list[float]:
        """Seconds after the kill until it was noticed, and until the engine served again."""
        roster, self._restarts = self._serving.roster, self._restarts + 1
        assert roster is not None
        times = []
        with roster._changed:
            for is_there in (
                lambda: 0 not in roster.serving() or roster.restarts["engine"] == self._restarts,
                lambda: roster.restarts["engine"] == self._restarts,
            ):
                assert roster._changed.wait_for(is_there, timeout=600)
                times.append(time.monotonic() - self.began)
        return times


@pytest.mark.slow
def test_vllms_engine_core_is_killed_or_has_no_memory_in_generation_a_sync_and_sleep(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(1, by_vllm=True)
    core, engine, length = VllmEnds(serving), serving.fleet.engines[0], 400
    noticed = []

    def kill_and_see() -> None:
        core.kill()
        noticed.append(core.wait())

    for answer in serving.generate("a", "b", beside=kill_and_see, num_tokens=length):
        assert [len(c.token_ids) for c in answer] == [length] * 3
        assert {c.weight_versions for c in answer} == {(VersionSpan(7, 0, length),)}
    assert serving.client.counters["retries"] > 0

    receive = engine.receive

    def die(bucket: Any) -> None:
        core.kill()
        receive(bucket)

    engine.receive = die  # type: ignore[method-assign]
    serving.sync.publish(7)
    del engine.receive
    noticed.append(core.wait())

    serving.trainer.writer.close()  # type: ignore[attr-defined]
    core.refuse_memory()  # the new segment cannot be mapped, and the engine says so in an answer
    serving.sync.publish(7)
    noticed.append(core.wait())

    engine.sleep(1)
    kill_and_see()
    (answer,) = serving.generate("c", num_tokens=8)
    assert {c.weight_versions for c in answer} == {(VersionSpan(7, 0, 8),)}
    print("noticed and served again after", noticed)
    assert all(seconds < 60 for seconds, _ in noticed)
