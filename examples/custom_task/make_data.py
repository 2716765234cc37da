"""The data set: each line asks for the price of one thing, and brings the price list that only the tool may read.

python examples/custom_task/make_data.py --out runs/custom_task/data
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

THINGS = "0123"
PRICES = "6789"


def make_line(rng: random.Random) -> dict[str, Any]:
    """One question. Prices are drawn anew for every line, so nobody can learn them by heart."""
    prices = {thing: rng.choice(PRICES) for thing in THINGS}
    thing = rng.choice(THINGS)
    return {"question": f"price of {thing}:", "answer": prices[thing], "metadata": {"thing": thing, "prices": prices}}


def write_data(folder: Path, *, num_train: int = 2000, num_heldout: int = 100, seed: int = 0) -> None:
    """Write train.jsonl and heldout.jsonl."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", num_train), ("heldout", num_heldout)):
        lines = [json.dumps(make_line(rng)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_data(options.out, seed=options.seed)
    print(f"{options.out}: train.jsonl, heldout.jsonl")
