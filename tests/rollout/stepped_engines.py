"""Engines that sample a token of each request when they are told to, by the policy version that they have then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from vime.protocols import Completion, GenerateRequest
from vime.types import VersionSpan

WAIT_S = 240  # for what comes at once, or never where something is wrong


def log_prob_of(version: int, place: int) -> float:
    """What this version gives the token at this place of prompt and response."""
    return -version - place / 1000


@dataclass(eq=False)
class _Running:
    request: GenerateRequest
    answer: asyncio.Future[None]
    spans: list[int] = field(default_factory=list)
    """The version of each token."""


class SteppedEngines:
    """The `Engines` protocol. `step` and `settle` are called from the test's thread.

    Args: length: tokens of a request's responses; they end with "stop", or with "length" at max_tokens.
    """

    def __init__(self, length: Callable[[GenerateRequest], int] = lambda request: 2) -> None:
        self._length, self.version = length, 1
        self.running: dict[str, _Running] = {}
        self.requests: list[GenerateRequest] = []
        self.max_running = 0
        self.num_closed = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._asked = threading.Event()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.loop = asyncio.get_running_loop()
        self.requests.append(request)
        running = self.running[request.request_id] = _Running(request, self.loop.create_future())
        self.max_running = max(self.max_running, len(self.running))
        self._asked.set()
        try:
            await running.answer
        finally:
            del self.running[request.request_id]
        done = len(running.spans) >= self._length(request)
        reason = "stop" if done else "length" if len(running.spans) >= request.sampling.max_tokens else "abort"
        return [_completion(running, reason)] * request.sampling.n

    async def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name in self.running and not self.running[name].answer.done():
                self.running[name].answer.set_result(None)

    async def aclose(self) -> None:
        self.num_closed += 1

    def step(self, times: int = 1) -> None:
        """A token for each request, and then everything that follows from it; `times` times."""
        for _ in range(times):
            self.on_loop(self._step())
            self.settle()

    def settle(self) -> None:
        """Return when the event loop has nothing to do but to wait for the test."""
        self.on_loop(_turns())

    def on_loop(self, work: Awaitable[None]) -> None:
        assert self._asked.wait(WAIT_S), "nobody has asked for anything"
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(_awaited(work), self.loop).result(WAIT_S)

    async def _step(self) -> None:
        for running in self.running.values():
            if running.answer.done():
                continue
            running.spans.append(self.version)
            if len(running.spans) >= min(self._length(running.request), running.request.sampling.max_tokens):
                running.answer.set_result(None)


def _completion(running: _Running, reason: str) -> Completion:
    first = len(running.request.token_ids)
    versions = running.spans
    return Completion(
        token_ids=tuple(5 + i % 3 for i in range(len(versions))),
        log_probs=tuple(log_prob_of(v, first + i) for i, v in enumerate(versions)),
        finish_reason=reason,
        weight_versions=tuple(
            VersionSpan(v, versions.index(v), versions.index(v) + versions.count(v)) for v in sorted(set(versions))
        ),
    )


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def _turns() -> None:
    for _ in range(200):
        await asyncio.sleep(0)
