"""HTTP clients of the engines: `VllmEngine` controls one, `RouterClient` generates through the router.

Neither imports vLLM. Control calls go straight to each engine: the router would hand them to one of its choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import httpx

from vime.engine.vllm.answers import RoutingShape, parse_completions, request_body
from vime.engine.vllm.engine_stats import parse_engine_stats
from vime.engine.vllm.retries import Attempts, Outages
from vime.engine.vllm.server import SERVED_MODEL_NAME
from vime.engine.vllm.versions import VllmAdapter, adapter_for
from vime.engine.vllm.watch import watched
from vime.errors import EngineDead, EngineError, WeightSyncError
from vime.observability.activity import Activity
from vime.observability.engine_stats import EngineStats
from vime.protocols import Completion, GenerateRequest, ProbeResult, SamplingParams
from vime.types import Metrics, PolicyVersion
from vime.wire import BucketMessage

_GENERATE_PATH = "/inference/v1/generate"
_STATS_TIMEOUT_S = 30.0
_ABORT_TIMEOUT_S = 30.0  # the server answers at once; a frozen one must not hold up a weight sync or a rollout's end


class VllmEngine:
    """The control side of one engine; satisfies `vime.protocols.Engine`.

    Args:
        url: the engine's own address.
        key: the run's key.
        adapter: of the engine's vLLM; of the installed one when None.
        timeout_s: of a control call.
        weight_timeout_s: of one bucket, or of closing a sync.
    """

    def __init__(
        self,
        url: str,
        key: str,
        adapter: VllmAdapter | None = None,
        *,
        timeout_s: float = 120.0,
        weight_timeout_s: float = 900.0,
    ) -> None:
        self.num_probes = self._num_calls = 0
        self._adapter = adapter or adapter_for()
        self._key, self._timeout_s, self._weight_timeout_s = key, timeout_s, weight_timeout_s
        self.move_to(url)

    def move_to(self, url: str) -> None:
        """Call another server from now on: the engine's next life."""
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=self._timeout_s,
            trust_env=False,  # a proxy of the environment is for the world outside, and must not see the run's key
            # vLLM's server closes a connection after an error and after 5 idle seconds, which a reused one finds out
            # too late; control calls are few, so each gets its own.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def stats(self) -> EngineStats:
        """What the engine has done since it started. Raises: EngineError if it does not answer."""
        try:
            response = self._http.get("/metrics", timeout=_STATS_TIMEOUT_S)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}/metrics: {type(error).__name__}: {error}") from error
        return parse_engine_stats(response.text)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def pause(self, mode: str = "keep") -> None:
        """Stop scheduling. mode: keep (requests are frozen), wait (until they end), abort (partial answers)."""
        # Waiting is as long as the longest request; the others are quick.
        answer = self._post("/pause", params={"mode": mode}, timeout=None if mode == "wait" else self._http.timeout)
        self._expect(answer, "status", "paused")

    def resume(self) -> None:
        """Schedule again. Raises: WeightSyncError if a weight sync was left half done; the engine then stays paused."""
        if reason := self.unfit_reason():
            raise WeightSyncError(f"{self.url} may not serve: {reason}; publish the weights again")
        self._expect(self._post("/resume"), "status", "resumed")

    def sleep(self, level: int = 1) -> None:
        """Free device memory, and stop scheduling. level 1: weights go to host memory; 2: weights are dropped.

        Buffers, which no sync brings, are kept at both levels. The next wake must be of the weights: it restores them.
        """
        self._post("/sleep", params={"level": level}, timeout=self._weight_timeout_s)
        self._expect(self._get("/is_sleeping"), "is_sleeping", True)  # 0.26 answers /sleep with an empty body

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Take device memory again: all of it, or "weights", or then "kv_cache". Once all is there, vLLM schedules."""
        self._post("/wake_up", params=[("tags", tag) for tag in tags], timeout=self._weight_timeout_s)
        if not tags or "kv_cache" in tags:
            # vLLM answers success to a tag that is awake already or never slept, and goes on sleeping.
            self._expect(self._get("/is_sleeping"), "is_sleeping", False)

    def begin_weights(self, version: PolicyVersion, transport: str, names: Sequence[str]) -> None:
        """Open a weight sync on a paused engine; a sync that was left half done is dropped first.

        Raises: WeightSyncError if the engine is not paused, or the names are not those of its checkpoint.
        """
        if self._get("/is_paused").get("is_paused") is not True:
            raise WeightSyncError(f"{self.url} is not paused; call pause before begin_weights")
        if any(state["is_open"] for state in self._sync_states()):
            self._rpc("vime_abandon_sync", "a weight sync was given up")
        info = {"version": version, "transport": transport, "names": list(names)}
        self._weights("/init_weight_transfer_engine", {"init_info": info})
        self._weights("/start_weight_update", {})

    def receive(self, bucket: BucketMessage) -> None:
        """Load one bucket. Raises: WeightSyncError naming the tensors whose checksum differs."""
        self._weights("/update_weights", {"update_info": bucket.to_json()})

    def commit(self, version: PolicyVersion) -> Metrics:
        """Close the sync: names complete, prefix cache reset, version stamped. Raises: WeightSyncError.

        Returns: see `vime.protocols.Engine`.
        """
        self._weights("/finish_weight_update", {})
        # Frozen requests hold blocks; they are preempted and their cache is computed again under the new weights.
        answer = self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if answer.get("success") is not True:
            self.mark_unfit("the prefix cache still holds entries of older weights")
            raise WeightSyncError(f"{self.url} did not reset its prefix cache: {answer}")
        if self._adapter.stamps_version:
            self._expect(self._post("/update_weight_version", {"new_version": str(version)}), "success", True)
        parts: list[dict[str, float]] = [state["seconds"] for state in self._sync_states()]
        return {part: max(seconds[part] for seconds in parts) for part in parts[0]}

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        """Greedy continuations of a few fixed prompts, asked of this engine itself, on a fresh prefix cache."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.num_probes += 1
        completions = []
        for prompt in prompts:
            name = f"probe-{uuid.uuid4().hex}"
            request = GenerateRequest(
                request_id=name, token_ids=tuple(prompt), sampling=sampling, routed_experts_start=None
            )
            body = self._post(_GENERATE_PATH, request_body(request, SERVED_MODEL_NAME), timeout=self._weight_timeout_s)
            # A probe's tokens are not trained on; where the engine reports no version, none is needed.
            completions += parse_completions(body, request, self._adapter, 0)
        return ProbeResult(tuple(tuple(prompt) for prompt in prompts), tuple(completions))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these generate requests, wherever their answers go; unknown ids are ignored."""
        if request_ids:  # an empty list would stop everything
            ids = [self._adapter.abort_id(request_id) for request_id in request_ids]
            self._expect(self._post("/abort_requests", {"request_ids": ids}), "status", "aborted")

    def health(self) -> bool:
        """Whether the engine answers GET /health with success within 5 s."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def is_mute(self, timeout_s: float) -> bool:
        """Whether the engine core and its workers say nothing for so long, though no control call keeps them busy."""
        calls, body = self._num_calls, {"method": "vime_sync_state", "args": []}
        try:
            self._http.post("/collective_rpc", json=body, timeout=timeout_s)
        except httpx.TimeoutException:
            return calls % 2 == 0 and self._num_calls == calls
        except httpx.TransportError:
            pass  # whoever watches the process notices
        return False

    def identity(self) -> list[dict[str, Any]]:
        """What each of the engine's workers says of model, dtype and machine (`WorkerExtension.vime_identity`)."""
        return self._rpc("vime_identity")

    def unfit_reason(self) -> str | None:
        """Why the engine's weights may not be used; None when they may."""
        return next((str(state["broken"]) for state in self._sync_states() if state["broken"]), None)

    def mark_unfit(self, reason: str) -> None:
        """Drop an open sync; stay paused and refuse to resume until another one ends well."""
        self.pause("abort")
        self._rpc("vime_abandon_sync", reason)

    def _sync_states(self) -> list[dict[str, Any]]:
        return self._rpc("vime_sync_state")

    def _rpc(self, method: str, *args: str) -> list[dict[str, Any]]:
        """One result per worker."""
        answer = self._post("/collective_rpc", {"method": method, "args": list(args)})
        results: list[dict[str, Any]] = answer.get("results") or []
        if not results or not all(isinstance(result, dict) for result in results):
            raise EngineError(f"{self.url} answered collective_rpc {method} with {results!r}")
        return results

    def _weights(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            self._post(path, body, timeout=self._weight_timeout_s)
        except EngineDead:
            raise
        except EngineError as error:
            raise WeightSyncError(str(error)) from error

    def _get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def _post(self, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        return self._call("POST", path, json=body, **options)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self._num_calls += 1  # odd while one is under way: an engine is called by one thread at a time
        try:
            response = watched(partial(self._http.request, method, path, **options), self.url)
        except httpx.ConnectError as error:
            raise EngineDead(f"{self.url}{path}: nobody listens there ({error}); the engine's log says why") from error
        except httpx.TransportError as error:
            raise EngineDead(f"{self.url}{path}: no answer ({type(error).__name__}: {error})") from error
        finally:
            self._num_calls += 1
        if response.status_code != 200:
            raise EngineError(f"{self.url}{path} answered {response.status_code}: {_reason(response.text)}")
        return dict(response.json()) if response.content else {}

    def _expect(self, answer: Mapping[str, Any], field: str, value: Any) -> None:
        if answer.get(field) != value:
            raise EngineError(f"{self.url} answered {dict(answer)}, expected {field} = {value!r}")


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
                        raise EngineError(f"{url}/abort_requests answered {response.status}: {_reason(text)}")
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
        attempts = Attempts(self._router_url + _GENERATE_PATH, self.counters, self.outages, most=1 if once else None)
        while True:
            url, before = self._router_url + _GENERATE_PATH, self._version
            try:
                async with self._session().post(url, json=body, headers=headers) as response:
                    if response.status == 200:
                        return dict(await response.json()), before
                    text = _reason(await response.text())
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                self.counters["connection_failures"] += 1
                await attempts.failed(f"{type(error).__name__}: {error}")
                continue
            if not attempts.may_pass(response.status):
                raise EngineError(f"{url} answered {response.status}: {text}")
            self.counters["unavailable_answers"] += 1
            await attempts.failed(f"status {response.status}: {text}")


def _cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def _reason(text: str) -> str:
    """The message inside an error body of vLLM's, or the body itself, shortened."""
    try:
        error = httpx.Response(200, text=text).json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:2000]
    except (ValueError, KeyError, TypeError):
        return text[:500]
