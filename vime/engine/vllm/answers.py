"""vLLM's generate requests and answers, spelt in vime's types. No vLLM is imported."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vime.engine.vllm.versions import VllmAdapter
from vime.errors import EngineError
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.types import PolicyVersion, VersionSpan

FINISH_REASONS = frozenset({"stop", "length", "abort"})
INITIAL_VERSION_LABEL = "default"  # vLLM's name for the weights it was started with
# RequestOutputKind.FINAL_ONLY: otherwise 0.26 answers a request for several samples with those that ended last.
_FINAL_ONLY = 2
_MISSING_LOG_PROB = -9999.0  # vLLM writes this where it has none, or NaN


def sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """vLLM's sampling parameters; log-probs of the sampled tokens always."""
    body: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "logprobs": 0,  # the sampled token's alone
        "output_kind": _FINAL_ONLY,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    else:
        body["detokenize"] = False  # only stop strings need the text
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    return body


def request_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    """The JSON body of POST /inference/v1/generate."""
    return {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "model": model,
        "stream": False,
        "sampling_params": sampling_body(request.sampling),
    }


def parse_completions(
    body: Mapping[str, Any], n: int, adapter: VllmAdapter, version: PolicyVersion | None
) -> list[Completion]:
    """The completions of one answer, in the order of their index.

    Args:
        body: the answer.
        n: how many were asked for.
        adapter: of the engine's release.
        version: stamped on all tokens where the engine does not report versions; not looked at otherwise.
    Raises: EngineError if completions, log-probs or versions are missing, or the finish reason is unknown.
    """
    choices = sorted(body.get("choices") or (), key=lambda choice: int(choice["index"]))
    if [choice["index"] for choice in choices] != list(range(n)):
        raise EngineError(f"asked for {n} completions, got those numbered {[c['index'] for c in choices]}")
    return [_completion(choice, adapter, version) for choice in choices]


def _completion(choice: Mapping[str, Any], adapter: VllmAdapter, version: PolicyVersion | None) -> Completion:
    token_ids = tuple(int(t) for t in choice["token_ids"] or ())
    reason = choice.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise EngineError(f"unknown finish reason {reason!r}; known: {', '.join(sorted(FINISH_REASONS))}")
    return Completion(
        token_ids=token_ids,
        log_probs=_log_probs(choice, token_ids),
        finish_reason=reason,
        weight_versions=_version_spans(choice, len(token_ids), adapter, version),
        routed_experts=_routed_experts(choice),
    )


def _log_probs(choice: Mapping[str, Any], token_ids: tuple[int, ...]) -> tuple[float, ...]:
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(token_ids):
        raise EngineError(f"{len(token_ids)} tokens came with {len(content)} log-probs")
    log_probs = []
    for position, (token_id, entry) in enumerate(zip(token_ids, content, strict=True)):
        value = float(entry["logprob"])
        if not math.isfinite(value) or value <= _MISSING_LOG_PROB:
            raise EngineError(f"token {position} (id {token_id}) came without a log-prob ({value})")
        if entry.get("token_id", token_id) != token_id:
            raise EngineError(f"token {position} has id {token_id}, its log-prob is of id {entry['token_id']}")
        log_probs.append(min(value, 0.0))  # rounding may leave a certain token a few 1e-8 above 0
    return tuple(log_probs)


def _version_spans(
    choice: Mapping[str, Any], num_tokens: int, adapter: VllmAdapter, version: PolicyVersion | None
) -> tuple[VersionSpan, ...]:
    if num_tokens == 0:
        return ()
    if not adapter.reports_version_spans:
        if version is None:
            raise EngineError(
                f"vLLM {adapter.version} does not report policy versions, and the client was not told the current one; "
                "call note_version after each weight sync"
            )
        return (VersionSpan(version, 0, num_tokens),)
    spans = tuple(
        VersionSpan(version_number(span["version"]), int(span["start"]), int(span["end"]))
        for span in choice.get("weight_versions") or ()
    )
    covered = sum(span.end - span.start for span in spans)
    if covered != num_tokens or (spans and (spans[0].start, spans[-1].end) != (0, num_tokens)):
        raise EngineError(f"the version spans {spans} do not cover the {num_tokens} tokens")
    return spans


def version_number(label: str) -> PolicyVersion:
    """A policy version from the engine's label. Raises: EngineError if vime did not write it."""
    if label == INITIAL_VERSION_LABEL:
        return 0
    if not label.isdecimal():
        raise EngineError(f"the engine's weights are labelled {label!r}, which is not a policy version")
    return int(label)


def _routed_experts(choice: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[Any]] | None:
    encoded = choice.get("routed_experts")
    if encoded is None:
        return None
    # An .npy file: [prompt + response - 1, layers, top_k]. Objects would be unpickled, so they are refused.
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)  # type: ignore[no-any-return]
