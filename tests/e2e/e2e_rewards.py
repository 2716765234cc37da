"""Rewards that an untrained model's samples differ in, so that there are advantages and gradients."""

import asyncio
from typing import Any


async def share_of_even_tokens(config: Any, sample: Any) -> float:
    tokens = sample.response_tokens
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


async def share_of_even_tokens_in_three_rollouts(config: Any, sample: Any) -> float:
    """Of 32 samples each; further ones, but held-out ones, are never judged."""
    if sample.sample_id >= 3 * 32 and "eval_set" not in sample.metadata:
        await asyncio.sleep(3600)
    return await share_of_even_tokens(config, sample)
