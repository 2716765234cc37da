"""The reward of chaos runs: a plain function, so that it runs in a grader's process of its own."""

from __future__ import annotations

from typing import Any

from vime.types import Sample


def share_of_even_tokens(config: Any, sample: Sample) -> float:
    """Differs between the samples of a group, so that every step has something to learn."""
    response = sample.response_tokens
    return sum(token % 2 == 0 for token in response) / max(1, len(response))
