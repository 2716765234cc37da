"""Addition problems with two operands below 100, and a held-out part whose operand pairs never occur in training."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_problems(folder: Path, *, seed: int, num_heldout: int = 400) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl`: all 10,000 ordered pairs, split at random.

    A pair and its mirror (27+68 and 68+27) are on the same side of the split.

    Returns: both paths. Raises: ValueError if the held-out part would be all of it.
    """
    if not 0 < num_heldout < 10_000:
        raise ValueError(f"num_heldout is {num_heldout}; there are 10,000 pairs")
    unordered = [(a, b) for a in range(100) for b in range(a, 100)]
    random.Random(seed).shuffle(unordered)
    heldout: set[tuple[int, int]] = set()
    for a, b in unordered:
        if len(heldout) >= num_heldout:
            break
        heldout |= {(a, b), (b, a)}
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed + 1).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, wanted in zip(paths, (False, True), strict=True):
        lines = [
            json.dumps({"problem": f"{a}+{b}=", "answer": str(a + b)})
            for a, b in pairs
            if ((a, b) in heldout) is wanted
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths
