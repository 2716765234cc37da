"""The control of one engine over HTTP: its weights, its sleep, its health. It does not import vLLM.

Control calls go straight to the engine: the router would hand them to one of its choice.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from vime.engine.vllm.answers import GENERATE_PATH, error_message, parse_completions, request_body
from vime.engine.vllm.engine_stats import parse_engine_stats
from vime.engine.vllm.server import SERVED_MODEL_NAME
from vime.engine.vllm.versions import VllmAdapter, adapter_for
from vime.engine.vllm.watch import watched
from vime.errors import EngineDead, EngineError, WeightSyncError
from vime.observability.engine_stats import EngineStats
from vime.protocols import GenerateRequest, ProbeResult, SamplingParams
from vime.types import Metrics, PolicyVersion
from vime.wire import BucketMessage

_STATS_TIMEOUT_S = 30.0


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
            body = self._post(GENERATE_PATH, request_body(request, SERVED_MODEL_NAME), timeout=self._weight_timeout_s)
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
            raise EngineError(f"{self.url}{path} answered {response.status_code}: {error_message(response.text)}")
        return dict(response.json()) if response.content else {}

    def _expect(self, answer: Mapping[str, Any], field: str, value: Any) -> None:
        if answer.get(field) != value:
            raise EngineError(f"{self.url} answered {dict(answer)}, expected {field} = {value!r}")
