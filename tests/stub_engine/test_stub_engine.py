"""A stub engine is, to vime's clients, what a real one is: its tests are those of the real one in small."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.stub_engine.brains import Dice, TinyModel, make_brain
from tests.stub_engine.settings import MODULE, StubSettings, read_settings
from tests.weight_sync.hf_trainer import HfTrainer
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.processes import SERVER_VARIABLE
from vime.engine.vllm.router import RouterProcess
from vime.engine.vllm.server import EngineServer
from vime.errors import WeightSyncError
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.types import VersionSpan
from vime.weight_sync import shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance
from vime.wire import BucketMessage

PROMPT = tuple(range(40, 60))
SLOW = StubSettings(brain="dice", token_s=0.02)


@pytest.fixture(scope="module")
def start_stub(
    tiny_qwen3: Path, run_key: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[StubSettings], EngineServer]]:
    servers: list[EngineServer] = []

    def start(settings: StubSettings) -> EngineServer:
        server = EngineServer(
            str(tiny_qwen3),
            arguments={"max_model_len": 512, "dtype": "float32", "max_num_seqs": 64},
            environment={SERVER_VARIABLE: MODULE, **settings.to_environment()},
            key=run_key,
            log_path=tmp_path_factory.mktemp("stub") / "engine.log",
        )
        servers.append(server)
        server.start()
        server.wait_ready(300)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def stub(start_stub: Callable[[StubSettings], EngineServer]) -> EngineServer:
    return start_stub(StubSettings())


@pytest.fixture(scope="module")
def slow(start_stub: Callable[[StubSettings], EngineServer]) -> EngineServer:
    return start_stub(SLOW)


def ask(name: str, **sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=PROMPT, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def generate(url: str, engine: EngineServer, key: str, *requests: GenerateRequest) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        client = RouterClient(url, [engine.url], key)
        try:
            return await asyncio.gather(*map(client.generate, requests))
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_the_stubs_logits_are_those_of_transformers(tiny_qwen3: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    brain = make_brain("model", tiny_qwen3)
    assert isinstance(brain, TinyModel)
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)(ids).logits
        assert float((brain.logits(ids) - theirs).abs().max()) < 1e-4


def test_generation_through_the_real_router_is_seeded_and_complete(
    stub: EngineServer, run_key: str, tmp_path: Path
) -> None:
    router = RouterProcess([stub.url], settings={}, key=run_key, log_path=tmp_path / "router.log")
    router.start()
    try:
        router.wait_ready()
        one, other, again = generate(
            router.url, stub, run_key, *(ask(f"r{i}", n=3, max_tokens=8, seed=seed) for i, seed in enumerate((1, 2, 1)))
        )
    finally:
        router.stop()
    assert one == again != other
    assert len({c.token_ids for c in one}) == 3
    assert all(c.weight_versions == (VersionSpan(0, 0, len(c.token_ids)),) for c in one)
    assert all(len(c.token_ids) == 8 if c.finish_reason == "length" else c.finish_reason == "stop" for c in one)


def test_a_weight_sync_is_verified_by_the_probe_and_a_damaged_one_refused(
    stub: EngineServer, run_key: str, tiny_qwen3: Path
) -> None:
    control, writer = VllmEngine(stub.url, run_key), shm.Writer()
    trainer = HfTrainer(tiny_qwen3, writer)
    sync = WeightSync(
        trainer,  # type: ignore[arg-type]
        [control],
        transport="shm",
        probe_prompts=[PROMPT],
        probe_interval=1,
        probe_tolerance=ProbeTolerance(1e-4),
    )
    try:
        trainer.perturb(1)
        assert sync.publish() == 1
        assert sync.metrics["weight_sync/probe_abs_diff_max"] < 1e-4
        assert sync.metrics["weight_sync/buckets"] > 3
        (completions,) = generate(stub.url, stub, run_key, ask("after", max_tokens=4, ignore_eos=True))
        assert completions[0].weight_versions == (VersionSpan(1, 0, 4),)

        def damaged(bucket: BucketMessage) -> BucketMessage:
            first, *others = bucket.tensors
            return dataclasses.replace(
                bucket, tensors=(dataclasses.replace(first, checksum=first.checksum ^ 1), *others)
            )

        trainer.tamper = damaged
        with pytest.raises(WeightSyncError, match="checksum differs"):
            sync.publish()
        with pytest.raises(WeightSyncError, match="may not serve"):
            control.resume()
        trainer.tamper, trainer.names = lambda bucket: bucket, lambda names: names[1:]
        with pytest.raises(WeightSyncError, match="missing"):
            sync.publish()
        trainer.names = lambda names: names
        sync.publish()
        assert len(trainer.score([PROMPT])[0]) == len(PROMPT) and np.isfinite(trainer.score([PROMPT])[0][1:]).all()
    finally:
        sync.close()
        control.close()
        writer.close()


def test_requests_freeze_through_a_pause_and_say_which_tokens_are_of_which_version(
    slow: EngineServer, run_key: str
) -> None:
    control = VllmEngine(slow.url, run_key)

    async def run() -> list[Completion]:
        client = RouterClient(slow.url, [slow.url], run_key)
        request = asyncio.create_task(client.generate(ask("frozen", max_tokens=400, seed=7)))
        await more_tokens(slow, run_key)
        await asyncio.to_thread(control.pause, "keep")
        assert not request.done()
        await asyncio.to_thread(control._post, "/update_weight_version", {"new_version": "5"})
        await asyncio.to_thread(control.resume)
        await more_tokens(slow, run_key)
        await client.abort(["frozen", "unknown"])
        completions = await request
        await client.aclose()
        return completions

    (completion,) = asyncio.run(run())
    control._post("/update_weight_version", {"new_version": "0"})
    control.close()
    assert completion.finish_reason == "abort"
    assert [span.version for span in completion.weight_versions] == [0, 5]
    assert len(completion.log_probs) == len(completion.token_ids) == completion.weight_versions[-1].end > 2


def running(engine: EngineServer, key: str) -> bool:
    return figure(engine, key, "num_requests_running") != 0


def figure(engine: EngineServer, key: str, name: str) -> float:
    """One of its metrics."""
    text = httpx.get(engine.url + "/metrics", headers={"Authorization": f"Bearer {key}"}).text
    return float(text.partition(f'vllm:{name}{{model_name="policy"}} ')[2].split()[0])


async def more_tokens(engine: EngineServer, key: str) -> None:
    """Wait until it has generated some."""
    before = await asyncio.to_thread(figure, engine, key, "generation_tokens_total")
    while await asyncio.to_thread(figure, engine, key, "generation_tokens_total") == before:
        await asyncio.sleep(0.01)


def test_a_request_whose_connection_is_closed_stops(slow: EngineServer, run_key: str) -> None:
    async def run() -> None:
        client = RouterClient(slow.url, [slow.url], run_key)
        request = asyncio.create_task(client.generate(ask("gone", max_tokens=400, ignore_eos=True)))
        while not await asyncio.to_thread(running, slow, run_key):
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await client.aclose()
        while await asyncio.to_thread(running, slow, run_key):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_nobody_gets_in_without_the_key(stub: EngineServer, run_key: str) -> None:
    with httpx.Client(base_url=stub.url) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in (("GET", "/metrics"), ("POST", "/pause"), ("POST", "/inference/v1/generate")):
                assert http.request(method, path, headers=headers).status_code == 401, (method, path)
        assert http.get("/health").status_code == 200
        assert http.get("/no-such-path", headers={"Authorization": f"Bearer {run_key}"}).status_code == 404


def test_a_stub_whose_owner_is_killed_ends(tiny_qwen3: Path, run_key: str, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from vime.engine.vllm.server import EngineServer\n"
        f"s = EngineServer({str(tiny_qwen3)!r}, arguments={{'max_model_len': 64}}, key='k', log_path=Path(sys.argv[1]),"
        f" environment={ {SERVER_VARIABLE: MODULE, **SLOW.to_environment()}!r})\n"
        "s.start(); s.wait_ready(300); print(s.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    stub = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    stub.wait(120)


def test_dice_fall_the_same_for_the_same_seed_however_many_at_a_time() -> None:
    from tests.stub_engine.scheduler import Running

    def roll(seed: int, count: int) -> list[list[int]]:
        sampling = {"n": 2, "seed": seed, "max_tokens": 30}
        run = Running({"token_ids": [1, 2], "sampling_params": sampling}, 100, frozenset({9}))
        dice = Dice(20, frozenset({9}))
        while not run.is_done:
            for i, step in enumerate(dice.step(run, count)):
                for token, log_prob in step:
                    run.add(i, token, log_prob, "0")
        return run.tokens

    assert roll(1, 50) == roll(1, 50) != roll(2, 50)
    assert all(tokens[-1] == 9 or len(tokens) == 30 for tokens in roll(1, 50))
    assert roll(3, 1) == roll(3, 7) == roll(3, 50)


def test_settings_travel_by_the_environment() -> None:
    assert read_settings(SLOW.to_environment()) == SLOW
    assert read_settings({}) == StubSettings()
