"""The client of rollouts: generates through the router, and aborts at each engine. It does not import vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from vime.engine.vllm.answers import GENERATE_PATH, RoutingShape, error_message, parse_completions, request_body
from vime.engine.vllm.retries import Attempts, Outages
from vime.engine.vllm.server import SERVED_MODEL_NAME
from vime.engine.vllm.versions import VllmAdapter, adapter_for
from vime.errors import EngineError
from vime.observability.activity import Activity
from vime.protocols import Completion, GenerateRequest
from vime.types import PolicyVersion

_ABORT_TIMEOUT_S = 30.0  # the server answers at once; a frozen one must not hold up a weight sync or a rollout's end


class RouterClient:
    """All engines through the router; satisfies `vime.protocols.Engines`.

    Use it inside one event loop at a time, and `await aclose()` before that loop ends. `counters` holds the numbers of
    requests, retries and their causes since the start, `activity` the time with a request under way.

    Args:
        router_url: where generate requests go.
        engine_urls: where aborts go, to each.
        key: the run's key.
        adapter: of the engines' vLLM; of the installed one when None.
        max_connections: requests in flight at a time.
        request_timeout_s: of one generate request; None waits as long as it takes.
        routing: of the model, where the engines were started to return routed experts.
        support_limit: the most log-probs of a position, where they were started to say what they could sample.

    `outages` may be set to who restarts engines and router: requests that fail meanwhile are then tried again until
    that has succeeded, or has been given up.
    """

    def __init__(
        self,
        router_url: str,
        engine_urls: Sequence[str],
        key: str,
        adapter: VllmAdapter | None = None,
        *,
        max_connections: int = 512,
        request_timeout_s: float | None = None,
        routing: RoutingShape | None = None,
        support_limit: int | None = None,
    ) -> None:
        self._router_url, self._engine_urls = router_url, tuple(engine_urls)
        self._adapter = adapter or adapter_for()
        self._headers = {"Authorization": f"Bearer {key}"}
        self._max_connections, self._request_timeout_s = max_connections, request_timeout_s
        self._routing, self._support_limit = routing, support_limit
        self._version: PolicyVersion | None = None
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self.counters: Counter[str] = Counter()
        self.activity = Activity()
        self.outages: Outages | None = None

    def set_addresses(self, router_url: str, engine_urls: Sequence[str]) -> None:
        """Requests that begin from now on, and aborts, go there: router or engines were restarted."""
        self._router_url, self._engine_urls = router_url, tuple(engine_urls)

    def note_version(self, version: PolicyVersion) -> None:
        """Tell the client which policy version is served now; needed where the engine does not report it (0.26)."""
        self._version = version

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`sampling.n` completions in one HTTP request.

        Raises: EngineError if the engines refuse the request, stay unreachable over several attempts, or answer with
            something incomplete.
        """
        headers = {"X-Request-Id": request.request_id}  # else the router makes one up, and an abort would not find it
        if request.session_id is not None:
            headers["X-Session-Id"] = request.session_id
        self.counters["requests"] += 1
        asked = request_body(request, SERVED_MODEL_NAME, self._routing, self._support_limit)
        with self.activity.running():
            body, before = await self._post_generate(asked, headers, once=request.batch is not None)
        if not self._adapter.reports_version_spans and self._version != before:
            raise EngineError(
                f"request {request.request_id} ran while the policy went from version {before} to {self._version}, and "
                f"vLLM {self._adapter.version} does not say which tokens are of which; let requests end before a sync"
            )
        return parse_completions(body, request, self._adapter, before, self._routing, self._support_limit)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests on whichever engine runs them. Raises: EngineError if an engine does not answer."""
        if not request_ids:
            return
        body = {"request_ids": [self._adapter.abort_id(request_id) for request_id in request_ids]}

        async def abort_on(url: str) -> None:
            try:
                async with session.post(f"{url}/abort_requests", json=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        raise EngineError(f"{url}/abort_requests answered {response.status}: {error_message(text)}")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EngineError(f"{url}/abort_requests: no answer ({type(error).__name__}: {error})") from error

        # Connections of their own: aborts must not wait for the requests that they end.
        timeout = aiohttp.ClientTimeout(total=_ABORT_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            results = await asyncio.gather(*map(abort_on, self._engine_urls), return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            raise errors[0]

    def call_off(self) -> None:
        """Cancel everything in the event loops that have connections here; called from a thread without one.

        The engines stop with a request whose connection is closed.
        """
        for loop in list(self._sessions):
            with contextlib.suppress(RuntimeError):  # the loop has been closed in this moment
                loop.call_soon_threadsafe(_cancel_all_tasks)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            for old in [old for old in list(self._sessions) if old.is_closed()]:
                self._sessions.pop(old).detach()  # its loop ended without aclose; nothing can be awaited there any more
            self._sessions[loop] = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                timeout=aiohttp.ClientTimeout(total=self._request_timeout_s, sock_connect=30.0),
            )
        return self._sessions[loop]

    async def _post_generate(
        self, body: Mapping[str, Any], headers: Mapping[str, str], *, once: bool
    ) -> tuple[dict[str, Any], PolicyVersion | None]:
        """The answer, and the policy version that was served when it was asked for. Retries as retries.py says.

        Args: once: no retries; one of a fixed batch that is sent again would be computed beside others.
        """
        attempts = Attempts(self._router_url + GENERATE_PATH, self.counters, self.outages, most=1 if once else None)
        while True:
            url, before = self._router_url + GENERATE_PATH, self._version
            try:
                async with self._session().post(url, json=body, headers=headers) as response:
                    if response.status == 200:
                        return dict(await response.json()), before
                    text = error_message(await response.text())
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                self.counters["connection_failures"] += 1
                await attempts.failed(f"{type(error).__name__}: {error}")
                continue
            if not attempts.may_pass(response.status):
                raise EngineError(f"{url} answered {response.status}: {text}")
            self.counters["unavailable_answers"] += 1
            await attempts.failed(f"status {response.status}: {text}", response.status)


def _cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
