"""The reward of this example: the last integer of the response, scored by reasoning-gym's own verifier.

Used as `--custom-rm-path examples.smollm2_chain_sum.reward.integer_reward`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from vime.errors import DataError
from vime.protocols import RolloutContext
from vime.types import Sample

# A minus between two numbers ("17-5") is an operator, not a sign. A fraction is taken along: 4.5 must not read as 5.
_NUMBER = re.compile("(?:(?<![\\w.])[-\u2212])?\\d[\\d,]*(?:\\.\\d+)?")


def last_integer(text: str) -> str | None:
    """The last number of `text` in plain digits with its sign; None when there is none or it has a fraction."""
    numbers = _NUMBER.findall(text)
    if not numbers or "." in numbers[-1]:
        return None
    return str(numbers[-1]).replace(",", "").replace("\u2212", "-")


@functools.cache
def verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    """reasoning-gym's `score_answer` of a task. Its import takes about a second, once per process."""
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


async def integer_reward(config: RolloutContext, sample: Sample) -> float:
    """1.0 when the last integer of the response is the answer, else 0.0 with `sample.metadata["reward_reason"]`.

    The verifier gives part of the credit to an answer that contains the gold one as text. Here the answer is a bare
    integer, so that would pay for a different number (-3 or 13 where 3 is right); only its full score counts.

    Raises: DataError if the sample brings no entry for the verifier.
    """
    try:
        entry = sample.metadata["entry"]
        task = entry["metadata"]["source_dataset"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"sample {sample.sample_id} has no metadata.entry of reasoning-gym ({error!r}); "
            "write the prompts with prepare_data.py, and keep --metadata-key metadata"
        ) from error
    answer = last_integer(sample.response)
    if answer is None:
        sample.metadata["reward_reason"] = "no integer at the end of the response"
        return 0.0
    try:
        score = verifier(task)(answer, entry)
    except (ValueError, ArithmeticError) as error:
        sample.metadata["reward_reason"] = f"the verifier refused {answer[:40]!r}: {error!r}"
        return 0.0
    if score < 1.0:
        sample.metadata["reward_reason"] = f"{answer[:40]} is not {entry['answer']}"
        return 0.0
    return 1.0
