"""An engine newly started with an HF checkpoint: it scores given tokens, or samples some."""

from __future__ import annotations

import math
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from vime.config import Config
from vime.config.hf import read_model_config
from vime.engine.vllm.answers import RoutingShape, parse_completions, request_body
from vime.engine.vllm.processes import local_client
from vime.engine.vllm.server import SERVED_MODEL_NAME, EngineServer
from vime.errors import ConfigError, EngineError
from vime.orchestration.engine_settings import engine_arguments, routing_shape
from vime.platform.base import Platform
from vime.protocols import GenerateRequest, SamplingParams
from vime.types import Sample, SampleStatus

_PATH = "/inference/v1/generate"
_REQUEST_TIMEOUT_S = 600.0
_AT_A_TIME = 16
_MEMORY_SHARE = 0.5
"""Of a CUDA device: HF and the trainer may have been on it before, and leave a part."""
_VERSION = 0  # of the weights an engine was started with


class FreshEngine:
    """A vLLM server of its own, for the time of a `with` block.

    Args:
        folder: the HF checkpoint.
        arguments, environment: as `EngineServer` takes them; `max_model_len` among the arguments.
        key: what its doors ask for.
        log_path: its log, which is removed where all went well.
        start_timeout_s: how long it may take to start.
        routing: of a model with experts: its samples say which ones were used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        key: str,
        log_path: Path,
        start_timeout_s: float,
        routing: RoutingShape | None = None,
    ) -> None:
        self._server = EngineServer(
            str(folder),
            arguments=arguments,
            environment=environment,
            key=key,
            log_path=log_path,
            routed_experts=routing is not None,
        )
        self._routing = routing
        self._limit, self._start_timeout_s = int(arguments["max_model_len"]), start_timeout_s
        self._http: httpx.Client = local_client(key)

    def __enter__(self) -> FreshEngine:
        try:
            self._server.start()
            self._server.wait_ready(self._start_timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self._server.log_path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        self._http.close()
        self._server.stop()

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float64]]:
        """One [length] array for each sequence, NaN first, at temperature 1: vLLM scores prompts at no other.

        What is longer than its context less one token, which it must sample, is NaN at the end.
        """
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return list(pool.map(self._score, range(len(sequences)), sequences))

    def _score(self, number: int, sequence: Sequence[int]) -> npt.NDArray[np.float64]:
        ids = tuple(sequence[: self._limit - 1])
        request = GenerateRequest(
            request_id=f"score-{number}",
            token_ids=ids,
            sampling=SamplingParams(max_tokens=1),
            routed_experts_start=None,
        )
        body = request_body(request, SERVED_MODEL_NAME, self._routing)
        body["sampling_params"]["prompt_logprobs"] = 0  # the prompt's own tokens alone
        entries = self._post(body).get("prompt_logprobs")
        if entries is None or len(entries) != len(ids):
            raise EngineError(f"the engine scored {len(entries or ())} of {len(ids)} tokens")
        scores = np.full(len(sequence), math.nan)
        for place in range(1, len(ids)):
            scores[place] = entries[place][str(ids[place])]["logprob"]
        return scores

    def sample(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Sample]:
        """`sampling.n` samples of each prompt, a group each, of policy version 0."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            groups = list(pool.map(lambda i: self._sample(i, prompts[i], sampling), range(len(prompts))))
        samples = [sample for group in groups for sample in group]
        for i, sample in enumerate(samples):
            sample.sample_id = sample.trajectory_id = i
        return samples

    def _sample(self, number: int, prompt: Sequence[int], sampling: SamplingParams) -> list[Sample]:
        request = GenerateRequest(request_id=f"sample-{number}", token_ids=tuple(prompt), sampling=sampling)
        answer = self._post(request_body(request, SERVED_MODEL_NAME, self._routing))
        samples = []
        for completion in parse_completions(answer, request, self._server.adapter, _VERSION, self._routing):
            sample = Sample(tokens=tuple(prompt), status=SampleStatus.COMPLETED, group_id=number)
            sample.append_response(
                completion.token_ids,
                completion.log_probs,
                version=completion.weight_versions,
                routed_experts=completion.routed_experts,
            )
            samples.append(sample)
        return samples

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._http.post(self._server.url + _PATH, json=body, timeout=_REQUEST_TIMEOUT_S)
        if answer.status_code != 200:
            self._server.check_alive()
            raise EngineError(f"{self._server.url}{_PATH} answered {answer.status_code}: {answer.text[:500]}")
        return dict(answer.json())


def engine_starter(config: Config, platform: Platform) -> Callable[[Path], FreshEngine]:
    """A function of an HF checkpoint's folder, that gives an engine as a run's are, on one device.

    Raises: ConfigError with what the machine lacks.
    """
    if missing := platform.missing():
        raise ConfigError(missing)
    alone = replace(config, cluster=replace(config.cluster, rollout_num_gpus_per_engine=1))

    def start(folder: Path) -> FreshEngine:
        hf = read_model_config(str(folder))
        routing = routing_shape(alone, hf)
        arguments = engine_arguments(alone, platform, hf)
        # One more than the run's: a sequence that fills the context is scored, and a token sampled behind it.
        arguments["max_model_len"] = min(arguments["max_model_len"] + 1, int(hf["max_position_embeddings"]))
        if platform.device_type == "cuda":
            arguments.setdefault("gpu_memory_utilization", _MEMORY_SHARE)
        return FreshEngine(
            folder,
            arguments=arguments,
            environment=platform.engine_environment(1, routed_experts=routing is not None)
            | (platform.aligned_engine()[1] if config.train.aligned else {}),
            key=secrets.token_urlsafe(32),
            log_path=Path(tempfile.gettempdir()) / f"vime_mismatch_{os.getpid()}_{secrets.token_hex(4)}.log",
            start_timeout_s=config.log.engine_start_timeout_s,
            routing=routing,
        )

    return start
