"""A teacher that a vLLM server has: its log-probs of the tokens that a student sampled (on-policy distillation).

Token ids are sent, never text, so both models must have one tokenizer; `check` compares them before a run starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from vime.config import TeacherConfig
from vime.errors import ConfigError, EngineError
from vime.types import Group, Metrics, Sample

_RETRIED_STATUSES = frozenset({408, 425, 429})
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0
_CHECK_TIMEOUT_S = 30.0
_COMPARED_IDS = 512
_LEAST = -9999.0  # vLLM's for minus infinity
_TEXTS = (
    "The teacher says: 3.14 + 2 = 5.14, isn't it?\n\n\tdef f(x):\n        return x**2  # naïve",
    "Größe 你好世界 Привет мир こんにちは 🙂 1234567890 https://example.org/a_b?c=d",
)


class _Unwell(Exception):
    """An attempt failed in a way that may pass."""


class ServedTeacher:
    """Asks the server about samples. Order of calls: `check`, then `score` for each rollout.

    Args: settings: with --opd-teacher-url. key: for the Authorization header; None: the server wants none.
    """

    def __init__(self, settings: TeacherConfig, key: str | None = None) -> None:
        assert settings.opd_teacher_url is not None
        url = urlsplit(settings.opd_teacher_url.rstrip("/"))
        # /tokenize is beside /v1, which users may have given as the address.
        self._url = url._replace(path=url.path.removesuffix("/v1")).geturl()
        self._settings, self._model = settings, settings.opd_teacher_model
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[Any] | None = None
        self._requests = self._retries = 0

    def check(self, tokenizer: Any, max_len: int) -> None:
        """Whether it is there, and can be asked about the student's tokens.

        Args: tokenizer: the student's. max_len: tokens of the longest sample.
        Raises: ConfigError with everything that is wrong.
        """
        if problems := asyncio.run(self._problems(tokenizer, max_len)):
            raise ConfigError([f"--opd-teacher-url {self._url} {problem}" for problem in problems])

    def score(self, groups: Sequence[Group]) -> Metrics:
        """Give each sample its `teacher_log_probs`.

        Returns: what it took. Raises: EngineError naming a sample that could not be scored, and why.
        """
        begin, self._requests, self._retries = time.perf_counter(), 0, 0
        samples = [s for group in groups for s in group.samples if s.response_length and s.teacher_log_probs is None]
        asyncio.run(self._score(samples))
        return {
            "rollout/teacher/requests": float(self._requests),
            "rollout/teacher/retries": float(self._retries),
            "rollout/teacher/seconds": time.perf_counter() - begin,
        }

    def call_off(self) -> None:
        """End a `score` that runs in another thread; it raises EngineError."""
        loop, work = self._loop, self._work
        if loop is not None and work is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed in this moment
                loop.call_soon_threadsafe(work.cancel)

    async def _score(self, samples: Sequence[Sample]) -> None:
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        connector = aiohttp.TCPConnector(limit=self._settings.opd_teacher_max_connections)
        try:
            async with (
                self._session(self._settings.opd_teacher_timeout_s, connector) as session,
                asyncio.TaskGroup() as all_,
            ):
                slots = asyncio.Semaphore(self._settings.opd_teacher_max_connections)
                for sample in samples:
                    all_.create_task(self._score_one(session, slots, sample))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except asyncio.CancelledError:
            raise EngineError("asking the teacher was called off") from None
        finally:
            self._loop = self._work = None

    async def _score_one(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, sample: Sample) -> None:
        who = f"sample {sample.sample_id} of group {sample.group_id}"
        last: _Unwell | None = None
        for attempt in range(1 + self._settings.opd_teacher_max_retries):
            if attempt:
                self._retries += 1
                await asyncio.sleep(
                    min(_FIRST_BACKOFF_S * 2 ** (attempt - 1), _MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
                )
            try:
                async with slots:
                    sample.teacher_log_probs = await self._attempt(session, sample, who)
                return
            except _Unwell as error:
                last = error
        raise EngineError(
            f"--opd-teacher-url {self._url} gave no log-probs of {who} in {1 + self._settings.opd_teacher_max_retries} "
            f"attempts; the last: {last}"
        )

    async def _attempt(self, session: aiohttp.ClientSession, sample: Sample, who: str) -> list[float]:
        """[R] log-probs. Raises: _Unwell; EngineError where asking again would not help."""
        self._requests += 1
        body = {
            "model": self._model,
            "prompt": list(sample.tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,  # of the prompt's own tokens
        }
        status, text = await self._post(session, "/v1/completions", body)
        if status != 200:
            raise EngineError(f"--opd-teacher-url {self._url} refused {who}: status {status}: {text[:300]}")
        try:
            choice = json.loads(text)["choices"][0]
            entries = choice["prompt_logprobs"]
            start = len(sample.tokens) - sample.response_length
            pairs = list(zip(sample.tokens, entries, strict=True))
            values = [float(entry[str(token)]["logprob"]) for token, entry in pairs[max(start, 1) :]]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(
                f"--opd-teacher-url {self._url} gave no prompt_logprobs of {who} ({error!r}): {text[:200]}; it must be "
                "a vLLM server"
            ) from error
        if odd := [v for v in values if not _LEAST < v < 1e-3]:
            raise EngineError(
                f"--opd-teacher-url {self._url} gave {who} a log-prob of {odd[0]:g}, which is none; start the server "
                "without --logprobs-mode"
            )
        return [0.0] * (sample.response_length - len(values)) + values  # a first token has none, and is never trained

    async def _problems(self, tokenizer: Any, max_len: int) -> list[str]:
        try:
            async with self._session(_CHECK_TIMEOUT_S) as session:
                problems = await self._model_problems(session, max_len)
                return problems or await self._tokenizer_problems(session, tokenizer)
        except _Unwell as error:
            return [f"does not answer as a vLLM server does: {error}"]

    async def _model_problems(self, session: aiohttp.ClientSession, max_len: int) -> list[str]:
        status, text = await self._get(session, "/v1/models")
        if status in (401, 403):
            return [f"answers {status}: it wants another key than --opd-teacher-key-file gives"]
        try:
            served = {model["id"]: model.get("max_model_len") for model in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise _Unwell(f"/v1/models: status {status}: {text[:200]}") from error
        if self._model is None and len(served) == 1:
            self._model = next(iter(served))
        if self._model not in served:
            which = "none is chosen" if self._model is None else f"not {self._model}"
            return [f"serves {', '.join(served)}, and {which}; give one as --opd-teacher-model"]
        longest = served[self._model]
        if longest is not None and longest < max_len + 1:
            return [
                f"takes {longest} tokens, but a sample may have {max_len}, and it must generate one more; start it "
                f"with --max-model-len {max_len + 1}"
            ]
        return []

    async def _tokenizer_problems(self, session: aiohttp.ClientSession, tokenizer: Any) -> list[str]:
        """Texts must become the same ids, and ids from all over the vocabulary and all added tokens the same text."""
        for text in _TEXTS:
            ours = list(tokenizer.encode(text))
            body = {"model": self._model, "prompt": text}
            theirs = (await self._json(session, "/tokenize", body)).get("tokens")
            if theirs != ours:
                return [f"has another tokenizer than --hf-checkpoint: {text[:20]!r}… is {theirs} there, {ours} here"]
        spread = list(range(0, len(tokenizer), max(1, len(tokenizer) // _COMPARED_IDS)))
        # Models of one family often differ in these alone, which lie together where the others miss them.
        added = sorted(tokenizer.get_added_vocab().values())
        for what, ids in (("ids", spread), ("ids of added tokens, such as those of chats,", added)):
            if not ids:
                continue
            theirs = (await self._json(session, "/detokenize", {"model": self._model, "tokens": ids})).get("prompt")
            if theirs != tokenizer.decode(ids):
                return [f"has another tokenizer than --hf-checkpoint: the same {what} are other text there"]
        return []

    def _session(self, timeout_s: float, connector: aiohttp.TCPConnector | None = None) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)

    async def _json(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, text = await self._post(session, path, body)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise _Unwell(f"{path}: status {status}: {text[:200]}")
        return answer

    async def _get(self, session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        return await self._ask(session.get(self._url + path, allow_redirects=False))

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return await self._ask(session.post(self._url + path, json=body, allow_redirects=False))

    @staticmethod
    async def _ask(request: Any) -> tuple[int, str]:
        """Status and text of an answer. Raises: _Unwell for what may pass."""
        try:
            async with request as response:
                text = await response.text(errors="replace")
        except TimeoutError as error:
            raise _Unwell("no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Unwell(f"{type(error).__name__}: {error}") from error
        if response.status >= 500 or response.status in _RETRIED_STATUSES:
            raise _Unwell(f"status {response.status}: {text[:200]}")
        return response.status, text
