"""Engines that a user started beforehand with `vime engine`: checked, used, given weights, left running."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vime
from vime.config import Config
from vime.config.dtype import run_dtype
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.errors import ConfigError, EngineError
from vime.orchestration import sizes
from vime.orchestration.fleet import Fleet

# Entries of config.json that say nothing about what the model computes.
_IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


def read_key(config: Config) -> str:
    """The key of the external engines, which becomes the run's."""
    assert config.cluster.rollout_external_engine_key_file is not None, "checked with the settings"
    return Path(config.cluster.rollout_external_engine_key_file).read_text(encoding="utf-8").strip()


class ExternalFleet(Fleet):
    """The external engines of a run, behind a router of its own; they outlive it.

    Args:
        hf_config: config.json of the run's checkpoint.
        log_dir: for the router's log.
    Raises: ConfigError with everything about the engines that does not fit the run.
    """

    def __init__(self, config: Config, *, hf_config: Mapping[str, Any], log_dir: Path) -> None:
        super().__init__(config, key=read_key(config), log_dir=log_dir, hf_config=hf_config)
        self.addresses = tuple(config.cluster.rollout_external_engine_addrs)
        self.engines = [self._engine_at(f"http://{address}") for address in self.addresses]
        self.num_readers = 0
        self.shared_memory_ids: set[str] = set()
        self.is_on_cuda = True
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
        self.is_on_cuda &= all(worker["device_type"] == "cuda" for worker in workers)
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
        if self._routing is not None and not told.get("routed_experts"):
            problems.append(f"{who} returns no routed experts; give --use-rollout-routing-replay to `vime engine`, too")
        if self._support_limit is not None and -1 < told["max_logprobs"] < self._support_limit:
            problems.append(
                f"{who} gives at most {told['max_logprobs']} log-probs of a position, and {self._support_limit} are "
                "needed to say what could have been sampled; give --rollout-top-k to `vime engine`, too"
            )
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
        return self._serve()

    @property
    def num_devices(self) -> int:
        """Devices of all engines: their worker processes."""
        return self.num_readers

    def dead_engines(self) -> str | None:
        """Those that do not answer."""
        dead = [engine.url for engine in self.engines if not engine.health()]
        return f"external engine {', '.join(dead)} does not answer; its own log says why" if dead else None


def model_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """The entries of two config.json files that make them different models, or None."""
    names = sorted((set(theirs) | set(ours)) - _IRRELEVANT)
    different = [n for n in names if theirs.get(n) != ours.get(n)]
    return ", ".join(f"{n} is {theirs.get(n)!r} there, {ours.get(n)!r} here" for n in different[:5]) or None
