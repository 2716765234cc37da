"""The requests of a stub engine: admitted, paused, aborted and answered as vLLM does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tests.stub_engine.brains import Brain
from tests.stub_engine.settings import StubSettings
from vime.engine.vllm.answers import INITIAL_VERSION_LABEL
from vime.engine.vllm.versions import VllmAdapter


class Refused(Exception):
    """A request that vLLM would answer with status 400."""


class Running:
    """One generate request under way."""

    def __init__(self, body: Mapping[str, Any], max_model_len: int, eos: frozenset[int]) -> None:
        sampling = body["sampling_params"]
        self.prompt: list[int] = body["token_ids"]
        self.n: int = sampling.get("n", 1)
        self.seed: int | None = sampling.get("seed")
        self.temperature: float = sampling.get("temperature", 1.0)
        self.ignore_eos: bool = sampling.get("ignore_eos", False)
        self._min_tokens: int = sampling.get("min_tokens", 0)
        self._ends = frozenset(sampling.get("stop_token_ids", ())) | (frozenset() if self.ignore_eos else eos)
        room = max_model_len - len(self.prompt)
        if not self.prompt or room < 1:
            raise Refused(f"a prompt of {len(self.prompt)} tokens does not fit a context of {max_model_len}")
        self.max_tokens = min(sampling.get("max_tokens") or room, room)
        self.tokens: list[list[int]] = [[] for _ in range(self.n)]
        self.log_probs: list[list[float]] = [[] for _ in range(self.n)]
        self.spans: list[list[list[Any]]] = [[] for _ in range(self.n)]
        """Of each sample [version label, start, end]."""
        self.finish: list[str | None] = [None] * self.n
        self.generators: dict[int, Any] = {}
        self.arrived_s = time.monotonic()
        self.wakes: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return None not in self.finish

    def abort(self) -> None:
        """End what goes on, with what it has."""
        self.finish = [reason or "abort" for reason in self.finish]
        if self.wakes is not None and not self.wakes.done():
            self.wakes.set_result(None)

    def add(self, index: int, token: int, log_prob: float, version: str) -> None:
        """One more token of a sample."""
        tokens, spans = self.tokens[index], self.spans[index]
        tokens.append(token)
        self.log_probs[index].append(log_prob)
        if not spans or spans[-1][0] != version:
            spans.append([version, len(tokens) - 1, 0])
        spans[-1][2] = len(tokens)
        if token in self._ends and len(tokens) > self._min_tokens:
            self.finish[index] = "stop"
        elif len(tokens) >= self.max_tokens:
            self.finish[index] = "length"

    def answer(self, request_id: str, adapter: VllmAdapter) -> dict[str, Any]:
        """The answer's body."""
        choices = []
        for i in range(self.n):
            content = [
                {"token_id": token, "logprob": value, "top_logprobs": []}
                for token, value in zip(self.tokens[i], self.log_probs[i], strict=True)
            ]
            choice: dict[str, Any] = {
                "index": i,
                "token_ids": self.tokens[i],
                "logprobs": {"content": content},
                "finish_reason": self.finish[i],
            }
            if adapter.reports_version_spans:
                choice["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in self.spans[i]]
            choices.append(choice)
        return {"request_id": request_id, "choices": choices}


class Scheduler:
    """Takes requests through their steps. Everything runs in one event loop."""

    def __init__(
        self, brain: Brain, settings: StubSettings, adapter: VllmAdapter, max_model_len: int, eos: frozenset[int]
    ) -> None:
        self.brain = brain
        self.version = INITIAL_VERSION_LABEL
        self.sleeping: set[str] = set()
        """What is asleep: weights, kv_cache."""
        self.is_paused = False
        self.num_requests = self.num_tokens = 0
        self.total_s = 0.0
        self._settings, self._adapter, self._max_model_len, self._eos = settings, adapter, max_model_len, eos
        self._running: dict[str, Running] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def generate(self, body: Mapping[str, Any], gone: asyncio.Future[Any]) -> dict[str, Any]:
        """The answer to a request. Args: gone: done when the client has closed the connection. Raises: Refused."""
        if problem := self.brain.problem(body["sampling_params"]):
            raise Refused(problem)
        run = Running(body, self._max_model_len, self._eos)
        request_id = str(body["request_id"])
        key = self._adapter.abort_id(request_id)
        if key in self._running:
            raise Refused(f"a request called {request_id} is under way")
        self._running[key] = run
        self._empty.clear()
        gone.add_done_callback(lambda _: run.abort())
        try:
            await self._sleep(run, self._settings.first_token_s)
            await self._take_steps(run)
        finally:
            del self._running[key]
            if not self._running:
                self._empty.set()
            self.num_requests += 1
            self.total_s += time.monotonic() - run.arrived_s
        return run.answer(request_id, self._adapter)

    async def _take_steps(self, run: Running) -> None:
        count = self._settings.tokens_per_step
        while not run.is_done:
            if not self._open.is_set():
                run.wakes = asyncio.get_running_loop().create_future()
                opened = asyncio.ensure_future(self._open.wait())
                await asyncio.wait({opened, run.wakes}, return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
                continue
            steps = self.brain.step(run, count)
            self.num_tokens += sum(map(len, steps))
            for i, tokens in enumerate(steps):
                for token, log_prob in tokens:
                    run.add(i, token, log_prob, self.version)
            await self._sleep(run, self._settings.token_s * max(map(len, steps)))

    async def _sleep(self, run: Running, seconds: float) -> None:
        """That long, or until the request is aborted."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        run.wakes = waker = loop.create_future()
        timer = loop.call_later(seconds, lambda: waker.done() or waker.set_result(None))
        try:
            await waker
        finally:
            timer.cancel()

    async def pause(self, mode: str) -> None:
        """Stop taking steps. mode: keep, wait or abort."""
        if mode == "abort":
            self.abort(list(self._running))
        if mode == "wait":
            await self._empty.wait()
        self.is_paused = True
        self._open.clear()

    def resume(self) -> None:
        """Take steps again, unless asleep."""
        self.is_paused = False
        if not self.sleeping:
            self._open.set()

    def fall_asleep(self) -> None:
        """Weights and cache leave the device."""
        self.sleeping = {"weights", "kv_cache"}
        self._open.clear()

    def wake(self, tags: list[str]) -> None:
        """These are back, or all."""
        self.sleeping -= set(tags) or {"weights", "kv_cache"}
        if not self.sleeping:
            self.resume()

    def abort(self, keys: list[str]) -> None:
        """End these requests; unknown ones are ignored."""
        for key in keys:
            if key in self._running:
                self._running[key].abort()

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._running)
