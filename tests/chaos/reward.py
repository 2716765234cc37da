"""The rewards of chaos runs: plain functions, so that they run in graders' processes of their own."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32

from vime.types import Sample

SAMPLES = 4
"""Of each prompt."""
_SLOW_S = 4.0
_SLOW_EVERY = 12  # prompts


def share_of_even_tokens(config: Any, sample: Sample) -> float:
    """Differs between the samples of a group, so that every step has something to learn."""
    response = sample.response_tokens
    return sum(token % 2 == 0 for token in response) / max(1, len(response))


def slow_for_some(config: Any, sample: Sample) -> float:
    """The same, but some prompts take so long that a stream gets on without them, and they are too old in the end."""
    is_first = sample.sample_id % SAMPLES == 0  # one grader is busy with it, not all
    if is_first and crc32(str(sample.prompt).encode()) % _SLOW_EVERY == 0:
        time.sleep(_SLOW_S)
    return share_of_even_tokens(config, sample)
