"""vllm-router in a process of its own, behind the run's key.

The router asks our validator about every caller's key and answers 401 without a valid one. Its own `api_key` is never
set: the router would add that key to anonymous calls instead of refusing them. Without it the caller's Authorization
header travels on to the engine, which demands the key again.

`RouterProcess` is the owner's side. `python -m vime.engine.vllm.router` is the process: it reads settings and key from
standard input, so that neither is on a command line, and ends when standard input closes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from vime.engine.vllm.health import until_failure
from vime.engine.vllm.middleware import is_authorized
from vime.engine.vllm.processes import (
    PORT_TRIES,
    free_port,
    import_path,
    local_client,
    log_tail,
    says_address_in_use,
    stop_process,
    without_proxies,
)
from vime.errors import ConfigError, EngineDead, EngineError

_OWNED = {
    "api_key": "it would let anonymous calls in; vime guards the router with the run's key",
    "worker_urls": "vime starts the engines",
    "host": "the router listens on the loopback address",
    "port": "the router takes a free port",
    "prometheus_host": "metrics are served on the loopback address",
    "mini_lb": "vime starts the router itself",
}

# vime's choices where the router's own would hurt; a user's --router-* wins.
_DEFAULTS: dict[str, Any] = {
    "policy": "cache_aware",
    "request_timeout_secs": 14_400,  # a long response on a busy engine takes more than the router's half hour
    "health_check_interval_secs": 3,  # the router's own 60 s would keep sending requests to a dead engine
    "health_check_timeout_secs": 10,  # an engine that compiles or syncs answers late, and is not dead
    "worker_startup_check_interval": 1,
    "log_level": "warn",
}

_READY_S = 120.0  # it starts in one or two; one that was stopped meanwhile must not hold up the run for long


class RouterProcess:
    """Owns one router process.

    start(), wait_ready(), then hand out `url`; stop() at the end. If the owner dies, the router ends by itself.

    Args:
        engine_urls: the engines to spread requests over; they must serve already.
        settings: fields of vllm-router's RouterArgs that the user set.
        key: the run's key.
        log_path: file the router's output is appended to.
    Raises: ConfigError if `settings` sets what vime sets itself, or there is no engine.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        *,
        settings: Mapping[str, Any],
        key: str,
        log_path: Path,
        host: str = "127.0.0.1",
    ) -> None:
        if owned := [
            f"--router-{name.replace('_', '-')} cannot be set: {_OWNED[name]}; leave it out"
            for name in settings
            if name in _OWNED
        ]:
            raise ConfigError(owned)
        if not engine_urls:
            raise ConfigError("a router needs at least one engine")
        if not key:
            raise ConfigError("the router needs the run's key, got an empty one")
        self.log_path = log_path
        self._host, self._key = host, key
        self._settings = {**_DEFAULTS, **settings, "worker_urls": list(engine_urls)}
        self._port = self._num_starts = self._log_begin = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """http://host:port; known once started."""
        if not self._port:
            raise EngineError("the router was not started yet, so it has no address")
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id, None before the start."""
        return self._process.pid if self._process else None

    def memory_bytes(self) -> int:
        """What the process has in memory; 0 if there is none."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss) if self.pid else 0
        except psutil.NoSuchProcess:
            return 0

    def start(self) -> None:
        """Start the process. Raises: EngineError if it was already started."""
        if self._process is not None:
            raise EngineError(f"the router was already started (pid {self._process.pid})")
        self._launch()

    def _launch(self) -> None:
        self._port = free_port(self._host)
        self._num_starts += 1
        settings = {
            **self._settings,
            "host": self._host,
            "port": self._port,
            "prometheus_host": self._host,
            "prometheus_port": self._settings.get("prometheus_port") or free_port(self._host),
        }
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {**without_proxies(os.environ), "PYTHONPATH": import_path(os.environ)}
        with self.log_path.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vime.engine.vllm.router"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # Kept open afterwards: its closing tells the process that its owner is gone.
        self._process.stdin.write(json.dumps({"key": self._key, "settings": settings}).encode() + b"\n")
        self._process.stdin.flush()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, timeout_s: float = _READY_S) -> float:
        """Block until every engine is listed as healthy. Returns: seconds it took; `url` is final from now on.

        If somebody took its port between the choice and the binding, it is started again on another.
        Raises: EngineDead with the end of the log if the process ended; EngineError if the time is up.
        """
        begin = time.monotonic()
        seen = "no answer"
        with local_client(self._key) as http:
            while time.monotonic() - begin < timeout_s:
                if not self.is_alive():
                    if self._num_starts < PORT_TRIES and says_address_in_use(self.log_path, self._log_begin):
                        self._launch()
                        continue
                    code, log = self._process and self._process.returncode, log_tail(self.log_path, 40)
                    raise EngineDead(f"the router ended with exit code {code}; end of {self.log_path}:\n{log}")
                try:
                    response = http.get(f"{self.url}/workers")
                    seen = f"{response.status_code} {response.text[:500]}"
                    workers = response.json().get("workers", []) if response.status_code == 200 else []
                    healthy = {worker["url"] for worker in workers if worker["is_healthy"]}
                    if healthy >= set(self._settings["worker_urls"]):
                        return time.monotonic() - begin
                except (httpx.TransportError, json.JSONDecodeError):
                    pass  # not listening yet
                time.sleep(0.1)
        raise EngineError(f"the router at {self.url} was not ready after {timeout_s:.0f} s; it last said: {seen}")

    def set_engines(self, engine_urls: Collection[str]) -> None:
        """Spread requests over these engines from now on, which serve. Raises: EngineError if it does not answer."""
        try:
            with local_client(self._key) as http:
                answer = http.get(f"{self.url}/workers")
                answer.raise_for_status()
                known = {worker["url"] for worker in answer.json().get("workers", [])}
                for path, urls in (
                    ("remove_worker", known - set(engine_urls)),
                    ("add_worker", set(engine_urls) - known),
                ):
                    for url in sorted(urls):
                        # It asks an engine that it adds for its health first.
                        http.post(f"{self.url}/{path}", params={"url": url}, timeout=60.0).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"the router at {self.url} did not take the engines: {error}") from error
        self._settings["worker_urls"] = list(engine_urls)

    def until_failure(self, *, interval_s: float, timeout_s: float) -> str:
        """Block until the router, which was ready, does not serve any more. Returns: why, in words."""
        assert self.pid is not None, "not started"
        return until_failure(
            pid=self.pid,
            url=self.url,
            path="/liveness",
            key=self._key,
            has_ended=self._end_in_words,
            interval_s=interval_s,
            timeout_s=timeout_s,
        )

    def _end_in_words(self) -> str | None:
        if self.is_alive():
            return None
        code = self._process and self._process.returncode
        return f"the router ended with exit code {code}; end of {self.log_path}:\n{log_tail(self.log_path, 20)}"

    def stop(self, grace_s: float = 5.0) -> None:
        """End the process; harmless when it has ended or never started."""
        if self._process is not None:
            stop_process(self._process, grace_s)


class KeyValidator:
    """The HTTP server the router asks about a caller's key: 200 to the run's key, 401 to anything else.

    Binds its port when made, so that the address is known before it serves.
    """

    def __init__(self, key: str, host: str = "127.0.0.1") -> None:
        self._key = key
        self._socket = socket.create_server((host, 0))
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/"

    def close(self) -> None:
        """Close this process's copy of the socket."""
        self._socket.close()

    async def serve(self) -> None:
        """Answer until cancelled."""
        async with await asyncio.start_server(self._serve, sock=self._socket) as server:
            await server.serve_forever()

    async def serve_until_owner_ends(self, router_pid: int) -> None:
        """Answer until standard input closes (the owner ended) or the router is gone; then end the process group."""
        serving = asyncio.create_task(self.serve())
        owner = asyncio.create_task(asyncio.to_thread(_wait_for_end_of_input))
        while not serving.done() and not owner.done() and os.getppid() == router_pid:
            await asyncio.sleep(0.5)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                await self._skip_body(request, reader)
                status = (
                    b"200 OK" if is_authorized(_header(request, b"authorization"), self._key) else b"401 Unauthorized"
                )
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the router closed its connection, or somebody speaks something else
        finally:
            writer.close()

    @staticmethod
    async def _skip_body(request: bytes, reader: asyncio.StreamReader) -> None:
        length = _header(request, b"content-length") or b"0"
        if length.isdigit():
            await reader.readexactly(int(length))


def _wait_for_end_of_input() -> None:
    while os.read(0, 4096):
        pass


def _header(request: bytes, name: bytes) -> bytes | None:
    values = [
        value.strip()
        for field, _, value in (line.partition(b":") for line in request.split(b"\r\n")[1:])
        if field.strip().lower() == name
    ]
    return values[0] if len(values) == 1 else None


def router_arguments(settings: Mapping[str, Any], validator_url: str) -> dict[str, Any]:
    """Arguments of vllm_router_rs.Router from RouterArgs fields.

    Raises: ConfigError on a setting that the installed router does not know.
    """
    from vllm_router.router import policy_from_str
    from vllm_router.router_args import RouterArgs

    known = {field.name for field in dataclasses.fields(RouterArgs)}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"vllm-router does not know the settings {', '.join(unknown)}")
    arguments = vars(RouterArgs(**settings)).copy()
    arguments.pop("mini_lb")
    for name in ("policy", "prefill_policy", "decode_policy"):
        arguments[name] = policy_from_str(arguments[name])
    if not arguments["vllm_pd_disaggregation"]:
        arguments["prefill_urls"] = arguments["decode_urls"] = None
    return {**arguments, "api_key": None, "api_key_validation_urls": [validator_url]}


def _end_with(pipe: int) -> None:
    """End this process when nobody holds the other end of a pipe any more, which nothing is ever written to.

    A router without its validator would refuse every caller and look alive. The kernel sends SIGIO, whose default is
    to end the process: no code of ours runs while Router.start does.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        raise SystemExit("the router's key check ended at its start")


def main() -> None:
    """The router process: settings from standard input, then serve until told to end."""
    given = json.loads(sys.stdin.buffer.readline())
    host = given["settings"]["host"]
    validator = KeyValidator(given["key"], host)
    # Router.start never lets go of the GIL, so the validator needs a process of its own; no thread runs yet to be lost.
    router_pid = os.getpid()
    life, held = os.pipe()
    if os.fork() == 0:
        asyncio.run(validator.serve_until_owner_ends(router_pid))
        os._exit(0)
    validator.close()  # the child has the socket
    os.close(held)
    _end_with(life)

    from vllm_router_rs import Router

    Router(**router_arguments(given["settings"], validator.url)).start()


if __name__ == "__main__":
    main()
