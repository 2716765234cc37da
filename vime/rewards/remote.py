"""Rewards from a server over HTTP (`--rm-type remote_rm --rm-url …`). docs/rewards.md defines request and answer.

The client has an event loop of its own in a thread: its connections and its circuit breaker outlive the loops that a
rollout function makes, and a rollout that is busy does not make an answer late.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from vime.errors import DataError, SampleRewardError
from vime.rewards.breaker import BreakerOpen, CircuitBreaker
from vime.rewards.checks import Reward, check_reward
from vime.rewards.grade import Verdict

if TYPE_CHECKING:
    import aiohttp

_MAX_ANSWER_BYTES = 1 << 20
_MAX_BACKOFF_S = 30.0
_RETRIED_STATUSES = frozenset({408, 425, 429})
_Judgement = Literal["correct", "wrong", "unparseable"]


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """What the server said of one sample."""

    reward: Reward
    verdict: Verdict | None = None


class RemoteFailure(SampleRewardError):
    """The server gave no usable answer for a sample, though it was asked repeatedly, or it refused the sample."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict

    def __reduce__(self) -> tuple[type[RemoteFailure], tuple[str, Verdict]]:
        return RemoteFailure, (str(self), self.verdict)


class _Unwell(Exception):
    """An attempt failed in a way that may pass: no connection, too late, 5xx, an answer that is none."""

    def __init__(self, message: str, *, is_timeout: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_timeout, self.retry_after_s = is_timeout, retry_after_s


class RemoteReward:
    """Asks a reward server about samples; `score` may be awaited from any event loop. `close` it at the end.

    Args:
        url: where requests are posted.
        timeout_s: seconds one attempt may take, from connecting to the answer's last byte.
        max_retries: further attempts after a failure that may pass.
        max_connections: connections kept, and attempts at a time.
        backoff_s: seconds before the first retry; doubled for each further one, up to 30.
        breaker_cooldown_s: seconds that requests pause when the server failed five times in a row; doubled, up to 30.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        max_retries: int = 10,
        max_connections: int = 64,
        backoff_s: float = 1.0,
        breaker_cooldown_s: float = 1.0,
    ) -> None:
        self._url, self._timeout_s, self._max_retries = url, timeout_s, max_retries
        self._max_connections, self._backoff_s = max_connections, backoff_s
        self._breaker = CircuitBreaker(lambda error: isinstance(error, _Unwell), cooldown_s=breaker_cooldown_s)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._counts: Counter[str] = Counter()
        self._answers, self._answers_s, self._slowest_s = 0, 0.0, 0.0
        self._openings_told = 0

    async def score(self, request: Mapping[str, Any]) -> RemoteAnswer:
        """The server's judgement of one sample.

        Raises: RemoteFailure when all attempts failed or the server refused the sample; DataError if the request is
        not JSON.
        """
        try:
            body = json.dumps(request, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise DataError(f"prompt, label and metadata go to --rm-url as JSON, which fails: {error}") from error
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._score(body), self._running_loop()))

    def take_metrics(self) -> dict[str, float]:
        """Counts and seconds since the last call, by the last part of the metric's name; empty if nothing was asked."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            answers, total_s, slowest_s = self._answers, self._answers_s, self._slowest_s
            self._answers, self._answers_s, self._slowest_s = 0, 0.0, 0.0
        if not counts:
            return {}
        openings = self._breaker.num_openings
        metrics = {name: float(counts[name]) for name in ("requests", "retries", "failed_samples")}
        metrics["breaker_openings"] = float(openings - self._openings_told)
        self._openings_told = openings
        if answers:
            metrics |= {"latency_mean": total_s / answers, "latency_max": slowest_s}
        return metrics

    def close(self) -> None:
        """Close the connections and end the thread; requests under way are cancelled."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="remote-reward", daemon=True)
                self._thread.start()
            return self._loop

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self._session = self._slots = None

    async def _score(self, body: bytes) -> RemoteAnswer:
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._max_connections)
        last: _Unwell | None = None
        for attempt in range(1 + self._max_retries):
            if attempt:
                self._count("retries")
                backoff_s = min(self._backoff_s * 2 ** (attempt - 1), _MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(backoff_s, last.retry_after_s if last is not None else 0.0))
            try:
                # The slot comes first: what has passed the breaker is sent at once, not after the server has failed.
                async with self._slots:
                    return await self._breaker.run(lambda: self._attempt(body))
            except BreakerOpen:
                last = last or _Unwell("it does not answer others either")
            except _Unwell as error:
                last = error
            except RemoteFailure:
                self._count("failed_samples")
                raise
        self._count("failed_samples")
        assert last is not None
        raise RemoteFailure(
            f"--rm-url {self._url} gave no reward in {1 + self._max_retries} attempts; the last: {last}",
            "timeout" if last.is_timeout else "crashed",
        )

    async def _attempt(self, body: bytes) -> RemoteAnswer:
        """One request and its answer. Raises: _Unwell, RemoteFailure."""
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections)
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self._count("requests")
        started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        try:
            post = self._session.post(self._url, data=body, headers=headers, allow_redirects=False)
            async with post as response:
                text = await _read(response)
                self._check_status(response, text)
                answer = self._answer(text)
        except TimeoutError as error:
            raise _Unwell(f"no answer within {self._timeout_s:g} s", is_timeout=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Unwell(f"{type(error).__name__}: {error}") from error
        seconds = time.monotonic() - started
        with self._lock:
            self._answers, self._answers_s = self._answers + 1, self._answers_s + seconds
            self._slowest_s = max(self._slowest_s, seconds)
        return answer

    def _check_status(self, response: aiohttp.ClientResponse, text: bytes) -> None:
        status = response.status
        if status == 200:
            return
        said = f"status {status}: {text[:200].decode(errors='replace')}"
        if status >= 500 or status in _RETRIED_STATUSES:
            raise _Unwell(said, retry_after_s=_retry_after_s(response.headers.get("Retry-After")))
        raise RemoteFailure(f"--rm-url {self._url} refused the sample with {said}", "crashed")

    @staticmethod
    def _answer(text: bytes) -> RemoteAnswer:
        """Raises: _Unwell; what is no reward may be the page of a proxy whose server is starting."""
        try:
            value = json.loads(text)
            verdict = None
            if isinstance(value, dict) and "reward" in value:
                if unknown := set(value) - {"reward", "verdict"}:
                    raise ValueError(f"unknown keys {sorted(unknown)} beside 'reward'")
                value, verdict = value["reward"], value.get("verdict")
                if verdict is not None and verdict not in get_args(_Judgement):
                    raise ValueError(f"unknown verdict {verdict!r}")
            return RemoteAnswer(check_reward(value, None), cast("Verdict | None", verdict))
        except (ValueError, RecursionError, SampleRewardError) as error:
            raise _Unwell(f"it answered {text[:200].decode(errors='replace')!r}: {error}") from error

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > _MAX_ANSWER_BYTES:
            raise _Unwell(f"it answered with more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(parts)


def _retry_after_s(header: str | None) -> float:
    """Seconds that the server asks to wait; a date is not read. At most a minute."""
    try:
        return min(max(float(header or 0), 0.0), 60.0)
    except ValueError:
        return 0.0
