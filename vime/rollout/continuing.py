"""Requests that live through a weight sync: aborted before it, they go on after it from the tokens they have.

    request     prompt ──▶ 40 tokens of version 3 │ sync │ prompt + 40 tokens ──▶ 25 tokens of version 4
    completion  65 tokens, spans ((3, 0, 40), (4, 40, 65))

No request is at an engine while its weights change, so every span is of the version that it names, whatever vLLM says
of versions (0.26 says nothing). Who asked for the completion, a generate function of a user's too, sees one request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vime.errors import EngineError
from vime.protocols import Completion, Engines, GenerateRequest
from vime.rollout.gate import Gate
from vime.rollout.generate import request_seed
from vime.types import RoutedRows, SamplingSupport, VersionSpan

logger = logging.getLogger(__name__)

_FIRST_SWEEP_S, _LAST_SWEEP_S = 0.1, 3.0  # between two aborts of requests that have not ended
_NOTHING = Completion(token_ids=(), log_probs=(), finish_reason="abort", weight_versions=())


@dataclass(slots=True, eq=False)
class _Live:
    """A request that somebody waits for."""

    is_called_off: bool = False
    """Its rollout has ended: what it has is all that is wanted."""
    was_interrupted: bool = False
    """It was at an engine when the gate was shut, and has not gone on since."""
    at_engines: set[str] = field(default_factory=set)
    """Ids of what was sent for it and has not been answered."""
    num_sent: int = 0


class ContinuingEngines:
    """The run's engines between weight syncs; satisfies `Engines`. Of one event loop.

    Around a sync: `await interrupt()`, then the sync, then `go_on()`.

    Args: engines: where requests go.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._gate = Gate()
        self._live: dict[str, _Live] = {}
        self._num_continued = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `Engines`. A completion is aborted only if `abort` was called, or the engine has done it by itself."""
        live = self._live[request.request_id] = _Live()
        try:
            completions = await self._ask(live, request)
            while live.was_interrupted and not live.is_called_off:
                live.was_interrupted = False
                completions = [_if_full(completion, request.sampling.max_tokens) for completion in completions]
                cut = [i for i, completion in enumerate(completions) if completion.finish_reason == "abort"]
                rest = await asyncio.gather(
                    *(self._ask(live, rest_of(request, completions[i], i)) for i in cut), return_exceptions=True
                )
                for i, result in zip(cut, rest, strict=True):
                    if isinstance(result, BaseException):
                        raise result
                    completions[i] = joined(completions[i], result[0])
                self._num_continued += len(cut)
            return completions
        finally:
            del self._live[request.request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engines`; those that wait for a sync to end are answered with what they have."""
        sent: list[str] = []
        for live in (self._live[name] for name in request_ids if name in self._live):
            live.is_called_off = True
            sent += live.at_engines
        self._gate.look_again()
        await self._engines.abort(sent)

    async def aclose(self) -> None:
        """See `Engines`."""
        await self._engines.aclose()

    async def interrupt(self) -> None:
        """Stop what engines generate; return when every request has been answered. Further ones wait for `go_on`."""
        self._gate.shut()
        pause_s = _FIRST_SWEEP_S
        while self._gate.num_inside:
            for live in self._live.values():
                live.was_interrupted = live.was_interrupted or bool(live.at_engines)
            # A request may reach its engine after the abort that was meant for it, so aborting is repeated.
            try:
                await self._engines.abort([name for live in self._live.values() for name in live.at_engines])
            except EngineError as error:
                logger.warning("an engine could not be asked to abort before the weight sync: %s", error)
            try:
                await asyncio.wait_for(self._gate.emptied(), pause_s)
            except TimeoutError:
                pause_s = min(2 * pause_s, _LAST_SWEEP_S)

    def go_on(self) -> None:
        """The weights are there."""
        self._gate.open()

    def take_num_continued(self) -> int:
        """Samples that went on after a sync, since the last call."""
        taken, self._num_continued = self._num_continued, 0
        return taken

    async def _ask(self, live: _Live, request: GenerateRequest) -> list[Completion]:
        """The answer, or nothing for all samples if the request was called off before it could be sent."""
        async with self._gate.passing(lambda: live.is_called_off) as inside:
            if not inside:
                return [_NOTHING] * request.sampling.n
            # Each part has an id of its own: a late abort of one must not find the next.
            name = request.request_id if not live.num_sent else f"{request.request_id}+{live.num_sent}"
            live.num_sent += 1
            live.at_engines.add(name)
            try:
                return list(await self._engines.generate(replace(request, request_id=name)))
            finally:
                live.at_engines.discard(name)


def _if_full(completion: Completion, max_tokens: int) -> Completion:
    """What was aborted at its last token has ended by its length."""
    is_full = completion.finish_reason == "abort" and len(completion.token_ids) >= max_tokens
    return replace(completion, finish_reason="length") if is_full else completion


def rest_of(request: GenerateRequest, begun: Completion, index: int) -> GenerateRequest:
    """What is left of a request's `index`-th sample.

    Its seed is another: with the first one the same random numbers would be drawn again.
    """
    sampling, num_tokens = request.sampling, len(begun.token_ids)
    start = request.routed_experts_start
    if start is not None and begun.routed_experts is not None:
        start = begun.routed_experts.start + len(begun.routed_experts.rows)
    return replace(
        request,
        token_ids=(*request.token_ids, *begun.token_ids),
        sampling=replace(
            sampling,
            n=1,
            max_tokens=sampling.max_tokens - num_tokens,
            min_tokens=max(0, sampling.min_tokens - num_tokens),
            seed=None if sampling.seed is None else request_seed(sampling.seed, "rest", index, num_tokens),
        ),
        routed_experts_start=start,
    )


def joined(first: Completion, rest: Completion) -> Completion:
    """One completion of both parts; neighbouring spans of one version are one."""
    offset = len(first.token_ids)
    spans = [*first.weight_versions]
    for span in rest.weight_versions:
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + offset)
        else:
            spans.append(VersionSpan(span.version, span.start + offset, span.end + offset))
    return Completion(
        token_ids=first.token_ids + rest.token_ids,
        log_probs=first.log_probs + rest.log_probs,
        finish_reason=rest.finish_reason,
        weight_versions=tuple(spans),
        support=SamplingSupport.joined([(offset, first.support), (len(rest.token_ids), rest.support)]),
        routed_experts=_joined_rows(first, rest),
    )


def _joined_rows(first: Completion, rest: Completion) -> RoutedRows | None:
    """Experts of both parts' tokens; none where they are not known of all that was sampled."""
    head, tail = first.routed_experts, rest.routed_experts
    if not rest.token_ids:
        return head
    if head is None or tail is None:
        return tail  # of the whole request, if the first part had none to send
    return RoutedRows(head.start, np.concatenate([head.rows, tail.rows]))
