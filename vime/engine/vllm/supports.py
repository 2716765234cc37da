"""What an engine could have sampled in the place of each token: asked for as log-probs, read from the answer.

An engine's log-probs are those of the distribution that it samples from. Whatever top-p, top-k and min-p have left out
has none there, so the most likely tokens of each position, as many as top-k lets through, are the support with all that
belongs to it. Every release and model runner of vLLM returns them, for the requests that ask.

vLLM 0.32 can return the support itself (`return_sampling_mask`). It is not used: such an engine refuses every request
of temperature 0 or without top-k, and so weight probes and greedy evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vime.errors import EngineError
from vime.protocols import GenerateRequest
from vime.support import SamplingSupport

_TIES = 16
"""Tokens beyond top-k that may be as likely as the last of it, which vLLM lets through as well."""
_NO_LOG_PROB = -9990.0
"""vLLM writes -9999 where a token has none."""
_TOLERANCE = 1e-4
"""What may be missing from 1 in the sum of a whole support's probabilities."""
_TOKEN_PREFIX = "token_id:"  # how 0.26 spells ids


def most_entries(top_k: int, vocab_size: int) -> int:
    """Log-probs of a position that hold the whole support of such a top-k."""
    return min(top_k + _TIES, vocab_size)


def entries_wanted(request: GenerateRequest, limit: int | None) -> int:
    """Log-probs to ask for at each position; 0: that of the sampled token alone.

    Args: limit: that the engines were started with; None: they are not to say what they could have sampled.
    Raises: EngineError for a request that lets more through than they could say.
    """
    sampling = request.sampling
    if limit is None or not request.wants_support or not sampling.is_narrow or sampling.temperature <= 0:
        return 0
    if sampling.top_k < 1:
        raise EngineError(
            f"request {request.request_id} has top_p {sampling.top_p:g} and min_p {sampling.min_p:g} without top_k, so "
            "that a token could have been any of the vocabulary, and answers cannot name them all; give it a top_k"
        )
    return min(sampling.top_k + _TIES, limit)


def read_support(content: Sequence[Mapping[str, Any]], wanted: int) -> SamplingSupport | None:
    """The supports of an answer's tokens; None where none were asked for.

    Args: content: the answer's log-probs, an entry a token. wanted: as `entries_wanted` gave it.
    Raises: EngineError if a position's probabilities do not sum to 1, so that some of its tokens are not there.
    """
    if not wanted:
        return None
    tops = [entry.get("top_logprobs") or () for entry in content]
    ids = np.array([_token_id(top) for entries in tops for top in entries], np.int32)
    log_probs = np.array([top["logprob"] for entries in tops for top in entries], np.float64)
    owner = np.repeat(np.arange(len(tops)), [len(entries) for entries in tops])
    kept = log_probs > _NO_LOG_PROB
    ids, log_probs, owner = ids[kept], log_probs[kept], owner[kept]
    totals = np.bincount(owner, np.exp(log_probs), minlength=len(tops))
    for position in np.flatnonzero(~(np.abs(totals - 1) < _TOLERANCE))[:1]:
        raise EngineError(
            f"token {position} came with the log-probs of {(owner == position).sum()} tokens, whose probabilities sum "
            f"to {totals[position]:.6f}: they are not all that could have been sampled. More than {_TIES} tokens "
            "beyond top_k are as likely as the last of it, or the log-probs are of another distribution"
        )
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(tops)))]).astype(np.int64)
    return SamplingSupport(ids, starts)


def _token_id(top: Mapping[str, Any]) -> int:
    """Raises: EngineError for an entry without one."""
    number = top.get("token_id")
    if number is None:
        text = str(top.get("token"))
        if not (text.startswith(_TOKEN_PREFIX) and text[len(_TOKEN_PREFIX) :].isdecimal()):
            raise EngineError(f"an engine named a token {text!r}; its id was expected")
        number = text[len(_TOKEN_PREFIX) :]
    return int(number)
