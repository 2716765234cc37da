"""Problems for benchmarks/agreement/experiment.py: reasoning-gym's chain_sum, answered with every partial sum.

"17 - 4 + 30" becomes the prompt "17-4+30=" and the solution "13;43", which a model with one token a character learns
in a minute; the reward looks at the last number alone.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

from vime.protocols import RolloutContext
from vime.types import Sample

_TERMS, _DIGITS = (4, 6), (1, 2)


def write_problems(folder: Path, *, num_train: int, num_heldout: int) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl`, lines of problem, solution and sum; none is in both.

    Returns: both paths.
    """
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        "chain_sum",
        size=2 * (num_train + num_heldout),
        seed=1,
        min_terms=_TERMS[0],
        max_terms=_TERMS[1],
        min_digits=_DIGITS[0],
        max_digits=_DIGITS[1],
    )
    lines: dict[str, dict[str, str]] = {}
    for entry in entries:
        words = entry["metadata"]["expression"].split()
        terms = [int(words[0]), *(int(sign + term) for sign, term in zip(words[1::2], words[2::2], strict=True))]
        solution = ";".join(map(str, list(accumulate(terms))[1:]))
        problem = "".join(words) + "="
        lines[problem] = {"problem": problem, "solution": solution, "sum": entry["answer"]}
    rows = list(lines.values())
    if len(rows) < num_train + num_heldout:
        raise ValueError(f"{len(rows)} different problems were made, {num_train + num_heldout} are wanted")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, part in zip(paths, (rows[num_heldout:][:num_train], rows[:num_heldout]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return paths


async def last_number_reward(config: RolloutContext, sample: Sample) -> float:
    """1.0 when what follows the last semicolon is the sum, else 0.0."""
    return float(sample.response.rpartition(";")[2].strip() == sample.label)
