"""vLLM's generate requests and answers, spelt in vime's types. No vLLM is imported."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.engine.vllm import short_answers
from vime.engine.vllm.supports import entries_wanted, read_support
from vime.engine.vllm.versions import VllmAdapter
from vime.errors import EngineError
from vime.models import ModelSettings
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.types import PolicyVersion, RoutedRows, VersionSpan

GENERATE_PATH = "/inference/v1/generate"
FINISH_REASONS = frozenset({"stop", "length", "abort"})
INITIAL_VERSION_LABEL = "default"  # vLLM's name for the weights it was started with
# RequestOutputKind.FINAL_ONLY: otherwise 0.26 answers a request for several samples with those that ended last.
_FINAL_ONLY = 2
_MISSING_LOG_PROB = -9999.0  # vLLM writes this where it has none, or NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """What the model's rows of routed experts look like."""

    num_layers: int
    """Decoder layers of the model, those without experts included."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, model: ModelSettings) -> RoutingShape:
        """That of a checkpoint with experts."""
        fields = model.transformer
        return cls(
            num_layers=fields["num_layers"], top_k=fields["moe_router_topk"], num_experts=fields["num_moe_experts"]
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every expert's number, which is what engines send."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


BATCH_KEY = "vime_batch"
"""Of a request's extra arguments: [name, size, index] of its fixed batch; see fixed_batches.py."""


def sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """vLLM's sampling parameters; log-probs of the sampled tokens alone."""
    body: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "logprobs": 0,
        "flat_logprobs": True,  # lists of numbers in the server, which its garbage collector need not walk
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


def request_body(
    request: GenerateRequest, model: str, routing: RoutingShape | None = None, support_limit: int | None = None
) -> dict[str, Any]:
    """The JSON body of POST /inference/v1/generate.

    Args:
        routing: of the model, where the engines were started to return routed experts.
        support_limit: the most log-probs of a position, where the engines were started to say what they could sample.
    Raises: EngineError for a request whose support they could not say.
    """
    sampling = sampling_body(request.sampling) | {"logprobs": entries_wanted(request, support_limit)}
    if routing is not None:
        # Engines cannot be told to send none; those of the prompt but its last token can be left out.
        last = len(request.token_ids) - 1
        start = request.routed_experts_start
        sampling["routed_experts_prompt_start"] = last if start is None else min(start, last)
    if (place := request.batch) is not None:
        sampling["extra_args"] = {BATCH_KEY: list(place)}
    return {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "model": model,
        "stream": False,
        "sampling_params": sampling,
    }


def parse_completions(
    body: Mapping[str, Any],
    request: GenerateRequest,
    adapter: VllmAdapter,
    version: PolicyVersion | None,
    routing: RoutingShape | None = None,
    support_limit: int | None = None,
) -> list[Completion]:
    """The completions of one answer, in the order of their index.

    Args:
        body: the answer.
        request: what was asked.
        adapter: of the engine's release.
        version: stamped on all tokens where the engine does not report versions; not looked at otherwise.
        routing, support_limit: as for `request_body`.
    Raises: EngineError if completions, log-probs, supports or versions are missing, the finish reason is unknown, or
        routed experts are not those of the model and the tokens.
    """
    n = request.sampling.n
    choices = sorted(body.get("choices") or (), key=lambda choice: int(choice["index"]))
    if [choice["index"] for choice in choices] != list(range(n)):
        raise EngineError(f"asked for {n} completions, got those numbered {[c['index'] for c in choices]}")
    entries = entries_wanted(request, support_limit)
    return [_completion(choice, request, adapter, version, routing, entries) for choice in choices]


def _completion(
    choice: Mapping[str, Any],
    request: GenerateRequest,
    adapter: VllmAdapter,
    version: PolicyVersion | None,
    routing: RoutingShape | None,
    entries: int,
) -> Completion:
    token_ids = tuple(int(t) for t in choice["token_ids"] or ())
    reason = choice.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise EngineError(f"unknown finish reason {reason!r}; known: {', '.join(sorted(FINISH_REASONS))}")
    return Completion(
        token_ids=token_ids,
        log_probs=_log_probs(choice, token_ids),
        finish_reason=reason,
        weight_versions=_version_spans(choice, len(token_ids), adapter, version),
        support=read_support((choice.get("logprobs") or {}).get("content") or [], entries),
        routed_experts=_routed_experts(choice, request, len(token_ids), routing),
    )


def _log_probs(choice: Mapping[str, Any], token_ids: tuple[int, ...]) -> tuple[float, ...]:
    content: Sequence[Mapping[str, Any]] = ()
    if short_answers.FIELD in choice:
        try:
            values = short_answers.decode(choice[short_answers.FIELD])
        except (TypeError, ValueError) as error:
            raise EngineError(f"log-probs are no float32 in base64: {error}") from error
    else:
        content = (choice.get("logprobs") or {}).get("content") or []
        values = np.array([entry["logprob"] for entry in content], np.float64)
    if len(values) != len(token_ids):
        raise EngineError(f"{len(token_ids)} tokens came with {len(values)} log-probs")
    for i in np.flatnonzero(~(np.isfinite(values) & (values > _MISSING_LOG_PROB)))[:1]:
        raise EngineError(f"token {i} (id {token_ids[i]}) came without a log-prob ({float(values[i])})")
    for i, (token_id, entry) in enumerate(zip(token_ids, content, strict=False)):
        if entry.get("token_id", token_id) != token_id:
            raise EngineError(f"token {i} has id {token_id}, its log-prob is of id {entry['token_id']}")
    return tuple(np.minimum(values, 0.0).tolist())  # rounding may leave a certain token a few 1e-8 above 0


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


def _routed_experts(
    choice: Mapping[str, Any], request: GenerateRequest, num_sampled: int, routing: RoutingShape | None
) -> RoutedRows | None:
    """None where none are wanted, or the engine had none to send; never fewer than it should have sent."""
    start, encoded = request.routed_experts_start, choice.get("routed_experts")
    if routing is None or start is None or encoded is None:
        return None
    start = min(start, len(request.token_ids) - 1)
    shape = (len(request.token_ids) + num_sampled - 1 - start, routing.num_layers, routing.top_k)
    rows = _array(encoded, shape, routing.dtype)
    if rows.size and (largest := int(rows.max())) >= routing.num_experts:
        raise EngineError(f"routed experts name expert {largest}, but a layer has {routing.num_experts}")
    return RoutedRows(start, rows)


def _array(encoded: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An .npy file in base64, of exactly this shape and type; its header is looked at before its contents."""
    npy: Any = np.lib.format
    try:
        file = io.BytesIO(base64.b64decode(encoded, validate=True))
        if (version := npy.read_magic(file)) != (1, 0):
            raise ValueError(f"version {version} of the format")
        told_shape, is_fortran, told_dtype = npy.read_array_header_1_0(file)
    except ValueError as error:
        raise EngineError(f"routed experts are no .npy file in base64: {error}") from error
    data = file.getbuffer()[file.tell() :]
    if told_shape != shape or told_dtype != dtype or len(data) != math.prod(shape) * dtype.itemsize:
        raise EngineError(
            f"routed experts have shape {told_shape}, type {told_dtype} and {len(data)} bytes, expected {shape} of "
            f"{dtype}: tokens up to the last but one, layers, experts of a token"
        )
    return np.ascontiguousarray(np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C"))


def error_message(text: str) -> str:
    """The message inside an error body of vLLM's, or the body itself, shortened."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:2000]
    except (ValueError, KeyError, TypeError):
        return text[:500]
