"""Generate answers whose log-probs are bytes, in the place of vLLM's objects for each token.

vLLM 0.26 and 0.32 make two pydantic objects of a sampled token's log-prob and 150 bytes of JSON of them. For eight
responses of 1,024 tokens that takes 0.2 s of the one thread that serves HTTP, and so 0.006 s. Where many responses end
at once, as those that reach the length limit do, the engine stands still meanwhile. Only requests for the sampled
tokens' log-probs alone (`logprobs` 0) are answered so; `answers.py` reads both kinds.
"""

from __future__ import annotations

import base64
import functools
import warnings
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FIELD = "log_probs"
"""Of a choice: base64 of little-endian float32, one a token."""

_MARK = "_vime_shortens_answers"


def encode(log_probs: npt.NDArray[np.float32]) -> str:
    """What FIELD holds."""
    return base64.b64encode(log_probs.astype("<f4").tobytes()).decode("ascii")


def decode(text: str) -> npt.NDArray[np.float32]:
    """What `encode` was given. Raises: ValueError if it is none of its texts."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4")


def sampled_log_probs(log_probs: Any, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """[R] those of the sampled tokens. Args: log_probs: an entry a token, as vLLM's outputs have them, flat or not."""
    if hasattr(log_probs, "start_indices"):  # flat_logprobs: the sampled token is the first of its position
        return np.asarray(log_probs.logprobs, np.float32)[np.asarray(log_probs.start_indices, np.int64)]
    return np.fromiter((entry[t].logprob for entry, t in zip(log_probs, token_ids, strict=True)), np.float32)


def install() -> None:
    """Let the server of this process answer so; twice does no harm. A vLLM that has another server is left alone."""
    try:
        from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    except ImportError as error:
        warnings.warn(f"log-probs travel as vLLM's own JSON, which is slower: {error}", stacklevel=2)
        return
    original = ServingTokens.serve_tokens_full_generator
    if not hasattr(original, _MARK):
        short = shortened(original)
        setattr(short, _MARK, original)
        ServingTokens.serve_tokens_full_generator = short  # type: ignore[method-assign]


def shortened(original: Any) -> Any:
    """`ServingTokens.serve_tokens_full_generator`, answering with bytes where it can."""

    async def serve(self: Any, request: Any, results: AsyncIterator[Any], *more: Any) -> Any:
        sampling = request.sampling_params
        if sampling.logprobs != 0:
            return await original(self, request, results, *more)
        last: list[Any] = []

        async def seen() -> AsyncIterator[Any]:
            async for result in results:
                last[:] = [result]
                yield result
            sampling.logprobs = None  # the engine is done with it; now it says what vLLM makes objects of

        answer = await original(self, request, seen(), *more)
        if not last or not hasattr(answer, "choices"):
            return answer  # an error
        kind: Any = type(answer)
        short = _short(kind).model_construct(**dict(answer))
        short._log_probs = [encode(sampled_log_probs(o.logprobs, o.token_ids)) for o in last[0].outputs]
        return short

    return serve


@functools.cache
def _short(kind: Any) -> Any:
    """A class of answers that is also this one of vLLM's; its HTTP route asks for that, and for a dict."""
    from pydantic import PrivateAttr

    class ShortAnswer(kind):  # type: ignore[misc]
        _log_probs: list[str] = PrivateAttr(default_factory=list)

        def model_dump(self, **options: Any) -> dict[str, Any]:
            body: dict[str, Any] = super().model_dump(**options)
            for choice, text in zip(body["choices"], self._log_probs, strict=True):
                choice[FIELD] = text
            return body

    return ShortAnswer
