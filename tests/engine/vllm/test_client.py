"""The generate client against a server that fails on purpose."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

from vime.engine.vllm import client as client_module
from vime.engine.vllm import retries
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.versions import KNOWN
from vime.errors import EngineDead, EngineError
from vime.protocols import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(request_id="r-1", token_ids=(1,), sampling=SamplingParams(), session_id="s-1")
ANSWER = {
    "choices": [
        {
            "index": 0,
            "token_ids": [5],
            "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "2", "start": 0, "end": 1}],
        }
    ]
}


def run(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    body: Callable[[RouterClient], Awaitable[Any]],
    minor: int = 32,
) -> Any:
    async def inner() -> Any:
        app = web.Application()
        app.router.add_post("/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}"
        client = RouterClient(url, [url, url], "key", KNOWN[0, minor])
        try:
            return await body(client)
        finally:
            await client.aclose()
            await runner.cleanup()

    return asyncio.run(inner())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_BACKOFF_S", 0.001)
    for name in ("http_proxy", "ALL_PROXY"):  # nothing here may ask a proxy
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_no_healthy_engine_right_now_is_tried_again_and_counted() -> None:
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return web.json_response(ANSWER) if len(seen) > 2 else web.Response(status=503)

    async def body(client: RouterClient) -> Any:
        return await client.generate(REQUEST), client.counters

    (completion,), counters = run(handler, body)
    assert completion.token_ids == (5,)
    assert counters == {"requests": 1, "retries": 2, "unavailable_answers": 2}
    headers = seen[-1].headers
    assert (headers["Authorization"], headers["X-Request-Id"], headers["X-Session-Id"]) == ("Bearer key", "r-1", "s-1")


def test_a_connection_that_breaks_is_tried_again() -> None:
    count = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(ANSWER)

    async def body(client: RouterClient) -> Any:
        await client.generate(REQUEST)
        return client.counters["connection_failures"]

    assert run(handler, body) == 1


@pytest.mark.parametrize("status", [400, 401, 422, 500])
def test_other_failures_are_told_at_once(status: int) -> None:
    count = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        return web.json_response({"error": {"message": "the prompt is too long"}}, status=status)

    with pytest.raises(EngineError, match=f"{status}: the prompt is too long"):
        run(handler, lambda client: client.generate(REQUEST))
    assert count == 1


def test_retries_end() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="no worker")

    with pytest.raises(EngineError, match="failed 6 times, last with status 503: no worker"):
        run(handler, lambda client: client.generate(REQUEST))


class FakeOutages:
    """A restart that takes until it was asked about so often; or that never succeeds."""

    def __init__(self, num_questions: int, failure: Exception | None = None, notice_s: float = 0.0) -> None:
        self.num_questions, self.failure, self.notice_s = num_questions, failure, notice_s

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def is_under_way(self) -> bool:
        self.num_questions -= 1
        return self.num_questions >= 0


def test_a_request_outlives_a_restart_of_any_length_and_goes_to_the_new_router() -> None:
    answered: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        answered.append(request.headers["X-Request-Id"])
        return web.json_response(ANSWER)

    async def body(client: RouterClient) -> Any:
        new, client.outages = client._router_url, FakeOutages(20)
        client.set_addresses("http://127.0.0.1:9", [])
        generating = asyncio.create_task(client.generate(REQUEST))
        while client.counters["retries"] < 10:
            await asyncio.sleep(0)
        client.set_addresses(new, [new])
        return await generating, client.counters

    (completion,), counters = run(handler, body)
    assert completion.token_ids == (5,)
    assert answered == ["r-1"], "asked once where it is answered, so nothing is doubled"
    assert counters["retries"] >= 10


@pytest.mark.parametrize("status", [500, 502, 504])
def test_what_the_router_says_of_an_engine_that_died_is_tried_again_where_engines_are_restarted(status: int) -> None:
    statuses = [status, 200]

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(ANSWER, status=statuses.pop(0))

    async def body(client: RouterClient) -> Any:
        client.outages = FakeOutages(0)
        return await client.generate(REQUEST)

    assert run(handler, body)[0].token_ids == (5,)


def test_a_request_waits_until_an_engine_that_is_no_longer_fit_is_found_out() -> None:
    statuses = [503] * 20 + [200]

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(ANSWER, status=statuses.pop(0))

    async def body(client: RouterClient, notice_s: float) -> Any:
        client.outages = FakeOutages(0, notice_s=notice_s)
        return await client.generate(REQUEST)

    assert run(handler, lambda client: body(client, 60))[0].token_ids == (5,)
    statuses[:] = [503] * 20
    with pytest.raises(EngineError, match="failed 6 times, last with status 503"):
        run(handler, lambda client: body(client, 0))
    statuses[:] = [500] * 20
    with pytest.raises(EngineError, match="failed 6 times, last with status 500"):
        run(handler, lambda client: body(client, 60))


def test_a_run_that_cannot_go_on_keeps_no_request_waiting() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    async def body(client: RouterClient) -> Any:
        client.outages = FakeOutages(10**9, EngineDead("engine 0 failed and is not started again"))
        return await client.generate(REQUEST)

    with pytest.raises(EngineDead, match="engine 0 failed"):
        run(handler, body)


def test_an_abort_goes_to_every_engine_by_the_id_vllm_knows() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({"status": "aborted"})

    async def body(client: RouterClient) -> None:
        await client.abort(["a", "b"])
        await client.abort([])  # an empty list would abort everything

    run(handler, body)
    assert bodies == [{"request_ids": ["generate-tokens-a", "generate-tokens-b"]}] * 2


def test_an_engine_that_does_not_answer_an_abort_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_ABORT_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = RouterClient(url, [url], "key", KNOWN[0, 32])
        with pytest.raises(EngineError, match="abort_requests: no answer"):
            asyncio.run(client.abort(["a"]))


def test_an_old_engine_and_a_sync_in_between_is_refused() -> None:
    clients: list[RouterClient] = []

    async def body(client: RouterClient) -> Any:
        client.note_version(3)
        assert (await client.generate(REQUEST))[0].weight_versions[0].version == 3
        clients.append(client)
        return await client.generate(REQUEST)

    async def handler(request: web.Request) -> web.StreamResponse:
        for client in clients:
            client.note_version(4)
        return web.json_response(ANSWER)

    with pytest.raises(EngineError, match="from version 3 to 4"):
        run(handler, body, minor=26)


def test_one_client_serves_one_loop_after_the_other() -> None:
    client = RouterClient("http://127.0.0.1:9", ["http://127.0.0.1:9"], "key", KNOWN[0, 32])
    for _ in range(2):
        with pytest.raises(EngineError, match="failed 6 times"):
            asyncio.run(client.generate(REQUEST))
    assert client.counters["requests"] == 2


def test_calling_off_ends_what_waits_in_another_thread_and_the_next_loop_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = RouterClient(url, [url], "key", KNOWN[0, 32])
        client.call_off()  # nobody is there yet

        async def wait() -> None:
            try:
                await client.generate(REQUEST)
            finally:
                await client.aclose()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(asyncio.run, wait())
            connection, _ = silent.accept()  # the request is under way
            client.call_off()
            with pytest.raises(asyncio.CancelledError):
                waiting.result(timeout=60)
            connection.close()
        client.call_off()  # that loop is closed
        silent.close()
        with pytest.raises(EngineError, match="failed 6 times"):
            asyncio.run(wait())
