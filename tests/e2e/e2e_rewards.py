"""A reward that an untrained model's samples differ in, so that there are advantages and gradients."""

from typing import Any


async def share_of_even_tokens(config: Any, sample: Any) -> float:
    tokens = sample.response_tokens
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)
