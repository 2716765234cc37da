"""Engines that a user started beforehand with `vime engine`: checked, used, given weights, left running."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import vime
from vime.config import Config
from vime.config.dtype import run_dtype
from vime.engine.vllm.client import RouterClient, VllmEngine
from vime.engine.vllm.router import RouterProcess
from vime.errors import ConfigError, EngineDead, EngineError
from vime.observability.engine_stats import EngineStats
from vime.orchestration import sizes
from vime.orchestration.engines import EngineFleet, read_stats, start_router

# Entries of config.json that say nothing about what the model computes.
_IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


def read_key(config: Config) -> str:
    """The key of the external engines, which becomes the run's."""
    assert config.cluster.rollout_external_engine_key_file is not None, "checked with the settings"
    return Path(config.cluster.rollout_external_engine_key_file).read_text(encoding="utf-8").strip()


class ExternalFleet:
    """The external engines of a run, behind a router of its own. Order of calls as with `EngineFleet`.

    Args:
        hf_config: config.json of the run's checkpoint.
        log_dir: for the router's log.
    Raises: ConfigError with everything about the engines that does not fit the run.
    """

    def __init__(self, config: Config, *, hf_config: Mapping[str, Any], log_dir: Path) -> None:
        self._config, self._log_dir = config, log_dir
        self._key = read_key(config)
        self._router: RouterProcess | None = None
        self.addresses = tuple(config.cluster.rollout_external_engine_addrs)
        self.engines = [VllmEngine(f"http://{address}", self._key) for address in self.addresses]
        self.num_readers = 0
        self.shared_memory_ids: set[str] = set()
        problems: list[str] = []
        for engine in self.engines:
            problems += self._check(engine, hf_config)
        if problems:
            self.close()
            raise ConfigError(problems)

    def _check(self, engine: VllmEngine, hf_config: Mapping[str, Any]) -> list[str]:
        who = f"--rollout-external-engine-addrs: {engine.url}"
        if not engine.health():
            return [f"{who} does not answer; was it started with `vime engine`, and can its port be reached?"]
        try:
            workers = engine.identity()
        except EngineError as error:
            if "401" in str(error):
                return [f"{who} refuses the key in {self._config.cluster.rollout_external_engine_key_file}"]
            return [f"{who} is no engine of `vime engine`: {error}"]
        self.num_readers += len(workers)
        self.shared_memory_ids |= {worker["shared_memory"] for worker in workers}
        told = workers[0]
        wanted = {
            "vime": vime.__version__,
            "dtype": run_dtype(self._config.megatron, hf_config),
            "quantization": None,
            "logprobs_mode": "processed_logprobs",
        }
        problems = [
            f"{who} has {name} {told.get(name)!r}, the run {value!r}"
            for name, value in wanted.items()
            if told.get(name) != value
        ]
        if difference := model_difference(told["config"], hf_config):
            problems.append(f"{who} serves another model than --hf-checkpoint: {difference}")
        if told["max_model_len"] < (needed := sizes.max_model_len(self._config, hf_config)):
            problems.append(
                f"{who} serves at most {told['max_model_len']} tokens, the run needs {needed} "
                "(--rollout-max-context-len, given to both)"
            )
        return problems

    def wait_ready(self, timeout_s: float) -> RouterClient:
        """Start the router; the engines were ready from the start."""
        urls = [engine.url for engine in self.engines]
        self._router = start_router(urls, self._key, self._config, self._log_dir)
        connections = self._config.rollout.rollout_concurrency
        return RouterClient(self._router.url, urls, self._key, max_connections=connections)

    @property
    def num_devices(self) -> int:
        """Devices of all engines: their worker processes."""
        return self.num_readers

    def stats(self) -> list[EngineStats] | None:
        """See `read_stats`."""
        return read_stats(self.engines)

    def check_alive(self) -> None:
        """Raises: EngineDead naming the engines that do not answer, or the router."""
        if dead := [engine.url for engine in self.engines if not engine.health()]:
            raise EngineDead(f"external engine {', '.join(dead)} does not answer; its own log says why")
        if self._router is not None and not self._router.is_alive():
            raise EngineDead(f"the router is gone; its last words are in {self._log_dir / 'router.log'}")

    def close(self) -> None:
        """End the router; the engines stay."""
        if self._router is not None:
            self._router.stop()
        for engine in self.engines:
            engine.close()


Fleet: TypeAlias = EngineFleet | ExternalFleet


def model_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """The entries of two config.json files that make them different models, or None."""
    names = sorted((set(theirs) | set(ours)) - _IRRELEVANT)
    different = [n for n in names if theirs.get(n) != ours.get(n)]
    return ", ".join(f"{n} is {theirs.get(n)!r} there, {ours.get(n)!r} here" for n in different[:5]) or None
