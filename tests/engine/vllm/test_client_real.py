"""The clients against a real engine behind a real router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.weight_sync.hf_trainer import HfTrainer
from vime.engine.vllm.answers import request_body
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.router import RouterProcess
from vime.engine.vllm.server import SERVED_MODEL_NAME, EngineServer
from vime.engine.vllm.short_answers import decode
from vime.errors import EngineError
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.weight_sync import disk

pytestmark = pytest.mark.engine

PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def router(engine: EngineServer, run_key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    process = RouterProcess(
        [engine.url],
        settings={"policy": "round_robin"},
        key=run_key,
        log_path=tmp_path_factory.mktemp("router") / "router.log",
    )
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture
def control(engine: EngineServer, run_key: str) -> Iterator[VllmEngine]:
    client = VllmEngine(engine.url, run_key)
    yield client
    client.close()


def ask(request_id: str, **sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, token_ids=PROMPT, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def test_the_engines_own_counters_say_what_it_did(
    control: VllmEngine, router: RouterProcess, engine: EngineServer, run_key: str
) -> None:
    before = control.stats()
    generate(router, engine, run_key, ask("stats", n=3, max_tokens=5, ignore_eos=True))
    done = control.stats().since(before)
    assert (done.num_requests, done.num_first_tokens, done.sampled_tokens) == (3, 3, 15)
    assert 0 < done.prefill_s < done.running_s <= done.total_s and done.decode_s > 0 and done.queue_s >= 0
    assert 0 < done.first_token_s <= done.total_s
    assert 0 <= done.cached_tokens <= done.looked_up_tokens == 3 * len(PROMPT)


def generate(router: RouterProcess, engine: EngineServer, key: str, request: GenerateRequest) -> list[Completion]:
    async def run() -> list[Completion]:
        client = RouterClient(router.url, [engine.url], key)
        try:
            return await client.generate(request)
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_the_servers_answers_hold_log_probs_as_bytes(control: VllmEngine) -> None:
    """By the correction of vLLM's server (short_answers.py), also with stop strings, whose responses are cut short."""
    request = ask("short", n=2, max_tokens=6, ignore_eos=True)
    body = control._post("/inference/v1/generate", request_body(request, SERVED_MODEL_NAME))
    assert all(choice["logprobs"] is None and len(decode(choice["log_probs"])) == 6 for choice in body["choices"])
    stopped = ask("stopped", n=4, max_tokens=40, stop=("A", "e", "a"))
    body = control._post("/inference/v1/generate", request_body(stopped, SERVED_MODEL_NAME))
    assert all(len(decode(choice["log_probs"])) == len(choice["token_ids"]) for choice in body["choices"])


def test_seeded_prompts_that_do_not_fit_into_one_engine_step_are_all_answered(
    router: RouterProcess, engine: EngineServer, run_key: str
) -> None:
    """vLLM 0.32 dies of a seeded prompt that is cut in two on the CPU; a step takes 2,048 prompt tokens."""
    requests = [
        GenerateRequest(
            request_id=f"long-{i}",
            token_ids=(*range(20, 20 + i), *(30 + (i * j) % 60 for j in range(300))),
            sampling=SamplingParams(max_tokens=2, seed=i, ignore_eos=True),
        )
        for i in range(12)
    ]

    async def run() -> list[list[Completion]]:
        client = RouterClient(router.url, [engine.url], run_key)
        try:
            return await asyncio.gather(*map(client.generate, requests))
        finally:
            await client.aclose()

    assert [len(c.token_ids) for answers in asyncio.run(run()) for c in answers] == [2] * 12


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_of_the_sampling_temperature(
    router: RouterProcess, engine: EngineServer, run_key: str, tiny_qwen3: Path, tmp_path: Path, temperature: float
) -> None:
    request = ask(f"t{temperature}", n=3, max_tokens=12, temperature=temperature, ignore_eos=True, seed=5)
    completions = generate(router, engine, run_key, request)
    model = HfTrainer(tiny_qwen3, disk.Writer(tmp_path)).model
    import torch

    assert len({c.token_ids for c in completions}) == 3  # one seed, yet three samples
    for completion in completions:
        ids = torch.tensor([[*PROMPT, *completion.token_ids]])
        with torch.no_grad():
            log_probs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        expected = log_probs.gather(-1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0].numpy()
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5)
        assert completion.finish_reason == "length"
        assert sum(span.end - span.start for span in completion.weight_versions) == 12


def test_the_same_seed_gives_the_same_tokens(router: RouterProcess, engine: EngineServer, run_key: str) -> None:
    first, second = (
        [c.token_ids for c in generate(router, engine, run_key, ask(f"s{i}", n=2, max_tokens=8, seed=11))]
        for i in range(2)
    )
    assert first == second


def test_a_stop_token_ends_a_response(router: RouterProcess, engine: EngineServer, run_key: str) -> None:
    greedy = generate(router, engine, run_key, ask("g", max_tokens=6, temperature=0.0, ignore_eos=True))[0]
    stop = greedy.token_ids[3]
    stopped = generate(
        router, engine, run_key, ask("h", max_tokens=6, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    )[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == greedy.token_ids[: greedy.token_ids.index(stop) + 1]


async def cut_off(client: RouterClient, control: VllmEngine, name: str, n: int) -> list[Completion]:
    """Completions of a request that is aborted when all have their first tokens.

    An engine may have come to an end of one before the abort, or not yet begun one of several; then it is asked again.
    """
    for attempt in range(20):
        before = control.stats().sampled_tokens
        request = ask(f"{name}-{attempt}", n=n, max_tokens=480, ignore_eos=True)
        task = asyncio.create_task(client.generate(request))
        while not task.done():
            if (await asyncio.to_thread(control.stats)).sampled_tokens >= before + n:
                await client.abort([request.request_id, "unknown"])
        if all(c.finish_reason == "abort" and c.token_ids for c in await task):
            return await task
    raise AssertionError("no abort came between the first and the last token of each")


def test_an_aborted_group_answers_with_what_it_has(
    router: RouterProcess, control: VllmEngine, engine: EngineServer, run_key: str
) -> None:
    async def run() -> list[Completion]:
        client = RouterClient(router.url, [engine.url], run_key)
        completions = await cut_off(client, control, "to-abort", 3)
        await client.aclose()
        return completions

    completions = asyncio.run(run())
    assert len(completions) == 3
    assert all(0 < len(c.token_ids) == len(c.log_probs) < 480 for c in completions)


def test_abort_of_one_request_leaves_the_others(
    router: RouterProcess, control: VllmEngine, engine: EngineServer, run_key: str
) -> None:
    async def run() -> list[Completion]:
        client = RouterClient(router.url, [engine.url], run_key)
        stays = asyncio.create_task(client.generate(ask("stays", max_tokens=480, ignore_eos=True)))
        await cut_off(client, control, "goes", 1)
        completions = await stays
        await client.aclose()
        return completions

    assert [(c.finish_reason, len(c.token_ids)) for c in asyncio.run(run())] == [("length", 480)]


def test_a_refused_request_says_why(router: RouterProcess, engine: EngineServer, run_key: str) -> None:
    with pytest.raises(EngineError, match=r"400.*512"):
        generate(
            router,
            engine,
            run_key,
            GenerateRequest(request_id="long", token_ids=(1,) * 600, sampling=SamplingParams()),
        )


def test_a_wrong_key_is_an_error(router: RouterProcess, engine: EngineServer) -> None:
    with pytest.raises(EngineError, match="401"):
        generate(router, engine, "wrong", ask("wrong-key"))


def test_paused_requests_wait_and_go_on(engine: EngineServer, control: VllmEngine, run_key: str) -> None:
    async def run() -> list[Completion]:
        client = RouterClient(engine.url, [engine.url], run_key)
        control.pause("keep")
        task = asyncio.create_task(client.generate(ask("frozen", max_tokens=4, ignore_eos=True)))
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        control.resume()
        completions = await task
        await client.aclose()
        return completions

    assert len(asyncio.run(run())[0].token_ids) == 4


def test_an_engine_sleeps_wakes_and_generates_as_before(control: VllmEngine) -> None:
    before = control.probe([PROMPT], 6)
    control.sleep(1)
    control.wake()
    assert control.probe([PROMPT], 6) == before


def test_health_is_false_where_nobody_listens(run_key: str) -> None:
    client = VllmEngine("http://127.0.0.1:9", run_key)
    assert client.health() is False
    client.close()
