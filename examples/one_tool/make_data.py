"""The data set: sums that a tool is asked for, as whole conversations to learn and as questions to be answered.

python examples/one_tool/make_data.py --out runs/one_tool/data
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int", "b": "int"}}}]


def make_line(rng: random.Random) -> dict[str, Any]:
    """One sum of two numbers of two digits: `messages` for supervised training, `question` and `answer` for GRPO."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    question = {"role": "user", "content": f"{a}+{b}"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    messages = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": f"It is {a + b}."},
    ]
    return {
        "messages": messages,
        "question": [question],
        "answer": str(a + b),
        "tools": TOOLS,
        "metadata": {"a": a, "b": b},
    }


def write_data(folder: Path, *, num_train: int = 4000, num_heldout: int = 100, seed: int = 0) -> None:
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
