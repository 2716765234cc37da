"""Small stand-ins that several tests share: a character tokenizer, engines that answer without a model."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vime.protocols import Completion, GenerateRequest
from vime.types import VersionSpan

EOS = "$"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}$\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def char_tokenizer() -> Any:
    """A real transformers tokenizer: one token per printable ASCII character, "$" ends a response."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(string.printable) - {EOS})
    vocab = {"<unk>": 0, EOS: 1, **{c: i for i, c in enumerate(characters, 2)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


class FakeEngines:
    """The `Engines` protocol without a model.

    `answer(request, i)` gives the i-th sample's token ids and finish reason; `before(request)` may wait or raise.
    Aborting wakes a waiting request, which then answers with finish_reason "abort".
    """

    def __init__(
        self,
        answer: Callable[[GenerateRequest, int], tuple[Sequence[int], str]],
        before: Callable[[GenerateRequest], Awaitable[None]] | None = None,
    ) -> None:
        self._answer = answer
        self._before = before
        self._aborted: dict[str, asyncio.Event] = {}
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.num_closed = 0
        self.num_running = 0
        self.max_running = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            if self._before is not None and not await self._survives(request, self._before(request)):
                return [completion([5], "abort") for _ in range(request.sampling.n)]
            return [completion(*self._answer(request, i)) for i in range(request.sampling.n)]
        finally:
            self.num_running -= 1

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()

    async def aclose(self) -> None:
        self.num_closed += 1

    async def _survives(self, request: GenerateRequest, work: Awaitable[None]) -> bool:
        event = self._aborted[request.request_id] = asyncio.Event()
        working, aborted = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({working, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            working.result()
            return True
        finally:
            working.cancel()
            aborted.cancel()
            del self._aborted[request.request_id]


def completion(token_ids: Sequence[int], finish_reason: str = "stop", version: int = 0) -> Completion:
    """A completion of these ids with some log-probs."""
    n = len(token_ids)
    log_probs = tuple(-0.5 - 0.25 * i for i in range(n))
    spans = (VersionSpan(version, 0, n),) if n else ()
    return Completion(
        token_ids=tuple(token_ids), log_probs=log_probs, finish_reason=finish_reason, weight_versions=spans
    )


def seeded_digits(tokenizer: Any, length: int = 3) -> Callable[[GenerateRequest, int], tuple[list[int], str]]:
    """Answers of random digits that depend on the request's seed alone, as a real engine's do."""
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    eos = tokenizer.eos_token_id

    def answer(request: GenerateRequest, index: int) -> tuple[list[int], str]:
        rng = random.Random(f"{request.sampling.seed} {request.token_ids} {index}")
        return [*rng.choices(digits, k=length), eos], "stop"

    return answer
