"""The stub's HTTP side: the routes of vLLM's server that vime calls, and their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import psutil

import vime
from tests.stub_engine.scheduler import Refused, Scheduler
from tests.stub_engine.weights import WeightReceiver
from vime.engine.vllm.middleware import Receive, Scope, Send
from vime.errors import VimeError
from vime.platform.machine import shared_memory_id


class StubApp:
    """An ASGI application.

    Args:
        identity: entries of `WorkerExtension.vime_identity` that depend on the command line.
        version: of vLLM, as told by GET /version.
    """

    def __init__(
        self, scheduler: Scheduler, weights: WeightReceiver, *, identity: Mapping[str, Any], version: str
    ) -> None:
        self._scheduler, self._weights = scheduler, weights
        self._identity, self._version = dict(identity), version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await _read(receive)
        status, answer = 200, b""
        try:
            result = await self._route(scope, body, receive)
            answer = result.encode() if isinstance(result, str) else json.dumps(result).encode()
        except Refused as error:
            status, answer = 400, _error(str(error))
        except KeyError as error:
            status, answer = 404, _error(f"not found: {error}")
        except (VimeError, ValueError, TypeError) as error:
            status, answer = 500, _error(str(error))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _route(self, scope: Scope, body: bytes, receive: Receive) -> Any:
        method, path = scope["method"], scope["path"]
        if method == "GET":
            return self._get(path)
        given = json.loads(body) if body else {}
        query = parse_qsl(scope["query_string"].decode())
        if path == "/inference/v1/generate":
            gone = asyncio.ensure_future(receive())  # http.disconnect is all that can come
            try:
                return await self._scheduler.generate(given, gone)
            finally:
                gone.cancel()
        if path == "/pause":
            await self._scheduler.pause(dict(query).get("mode", "abort"))
            return {"status": "paused"}
        return self._post(path, given, query)

    def _get(self, path: str) -> Any:
        scheduler = self._scheduler
        return {
            "/health": lambda: "",
            "/version": lambda: {"version": self._version},
            "/is_paused": lambda: {"is_paused": scheduler.is_paused},
            "/is_sleeping": lambda: {"is_sleeping": bool(scheduler.sleeping)},
            "/metrics": self._metrics,
            "/v1/models": lambda: {"object": "list", "data": [{"id": "policy", "object": "model"}]},
            "/server_info": lambda: {"stub": True},
        }[path]()

    def _post(self, path: str, given: dict[str, Any], query: list[tuple[str, str]]) -> Any:
        scheduler = self._scheduler
        match path:
            case "/resume":
                scheduler.resume()
                return {"status": "resumed"}
            case "/sleep":
                scheduler.fall_asleep()
                return {}
            case "/wake_up":
                scheduler.wake([value for name, value in query if name == "tags"])
                return {}
            case "/abort_requests":
                scheduler.abort(given["request_ids"])
                return {"status": "aborted"}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/update_weight_version":
                scheduler.version = given["new_version"]
                return {"success": True}
            case "/collective_rpc":
                return {"results": [self._rpc(given["method"], given.get("args") or [])]}
        return self._weight_call(path, given)

    def _weight_call(self, path: str, given: dict[str, Any]) -> Any:
        if path == "/init_weight_transfer_engine":
            self._weights.init(given["init_info"])
        elif path == "/start_weight_update":
            self._weights.start()
        elif path == "/update_weights":
            self._weights.update(given["update_info"])
        elif path == "/finish_weight_update":
            self._scheduler.brain.load(self._weights.finish())
        else:
            raise KeyError(path)
        return {}

    def _rpc(self, method: str, args: list[Any]) -> dict[str, Any]:
        if method == "vime_identity":
            return {
                "vime": vime.__version__,
                "quantization": None,
                "logprobs_mode": "processed_logprobs",
                "shared_memory": shared_memory_id(),
                "routed_experts": False,
                "device_type": "cpu",
                **self._identity,
            }
        if method == "vime_abandon_sync":
            self._weights.abandon(str(args[0]))
        elif method != "vime_sync_state":
            raise KeyError(method)
        return self._weights.state()

    def _metrics(self) -> str:
        scheduler = self._scheduler
        figures = {
            "vllm:e2e_request_latency_seconds_count": scheduler.num_requests,
            "vllm:e2e_request_latency_seconds_sum": scheduler.total_s,
            "vllm:request_inference_time_seconds_sum": scheduler.total_s,
            "vllm:generation_tokens_total": scheduler.num_tokens,
            "vllm:num_requests_running": scheduler.num_running,
        }
        lines = [f'{name}{{model_name="policy"}} {float(value)}' for name, value in figures.items()]
        return "\n".join([*lines, f"process_resident_memory_bytes {psutil.Process().memory_info().rss}", ""])


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
