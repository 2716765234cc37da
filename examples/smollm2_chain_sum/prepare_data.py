"""Write reasoning-gym's chain_sum as JSONL prompts: train.jsonl and heldout.jsonl.

    python examples/smollm2_chain_sum/prepare_data.py --out data/chain_sum

One line holds `messages` (the prompt), `label` (the gold answer) and `metadata.entry` (what reasoning-gym's verifier
reads). The prompt shows one solved problem, so that the model writes the equation out and ends there: README.md has
what that is worth. Each number of digits has the same share of both files. No held-out problem occurs in train, nor
does the same sum with its terms swapped; the solved problem is in neither.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASK = "chain_sum"
INSTRUCTION = "Complete the equation."
QUESTION = "State the final answer to the following arithmetic problem: {} ="  # as reasoning-gym words it
EXAMPLE = ("8 + 5", "8 + 5 = 13")

Entry = dict[str, Any]


def entries(seed: int, digits: tuple[int, int], num_terms: int = 2) -> Iterator[Entry]:
    """chain_sum's entries, without end and in a fixed order: {question, answer, metadata}."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        TASK,
        seed=seed,
        size=1_000_000_000,  # entries are made when they are asked for
        min_terms=num_terms,
        max_terms=num_terms,
        min_digits=digits[0],
        max_digits=digits[1],
    )
    for index in range(1_000_000_000):
        yield dataset[index]


def problem_key(entry: Entry) -> str:
    """What makes two entries the same problem: the expression, with the terms of a plain sum sorted."""
    return expression_key(entry["metadata"]["expression"])


def expression_key(expression: str) -> str:
    """ "4 + 9" for "9 + 4"; a difference as it stands."""
    return expression if "-" in expression else " + ".join(sorted(expression.split(" + ")))


def num_problems(digits: int) -> int:
    """How many different two-term problems there are with this many digits: sums up to order, and differences."""
    n = 10 if digits == 1 else 9 * 10 ** (digits - 1)
    return n * (n + 1) // 2 + n * n


def split(digits: tuple[int, int], num_train: int, num_heldout: int, seed: int) -> tuple[list[Entry], list[Entry]]:
    """Entries to train on and entries held out, each with equal shares of every number of digits.

    Args:
        digits: fewest and most digits of a term.
        num_train: entries to train on; a problem may come up more than once, as the generator draws it (there are
            155 problems of one digit).
        num_heldout: different problems to hold out; a multiple of the number of classes of digits, as num_train.
        seed: of the generator. Both parts come from one stream, so no seed can make them overlap.
    Raises: ValueError if the counts do not divide, or if more than half of some class would be held out.
    """
    classes = range(digits[0], digits[1] + 1)
    for name, count in (("num_train", num_train), ("num_heldout", num_heldout)):
        if count <= 0 or count % len(classes):
            raise ValueError(f"{name} is {count}; give a positive multiple of {len(classes)}, a share per digit count")
    share = num_heldout // len(classes)
    for d in classes:
        if share > num_problems(d) // 2:
            raise ValueError(
                f"num_heldout is {num_heldout}: {share} problems of {d} digits, more than half of the "
                f"{num_problems(d)} there are; hold out at most {len(classes) * (num_problems(d) // 2)}"
            )
    shown = expression_key(EXAMPLE[0])
    stream = (entry for entry in entries(seed, digits) if problem_key(entry) != shown)
    heldout: dict[str, Entry] = {}
    taken: Counter[int] = Counter()
    while len(heldout) < num_heldout:
        entry = next(stream)
        d, key = entry["metadata"]["num_digits"], problem_key(entry)
        if taken[d] < share and key not in heldout:
            heldout[key] = entry
            taken[d] += 1
    train: list[Entry] = []
    taken = Counter()
    while len(train) < num_train:
        entry = next(stream)
        d = entry["metadata"]["num_digits"]
        if taken[d] < num_train // len(classes) and problem_key(entry) not in heldout:
            train.append(entry)
            taken[d] += 1
    return train, list(heldout.values())


def row(entry: Entry) -> dict[str, Any]:
    """One JSONL line: the prompt as chat messages, the gold answer, and the entry for the verifier."""
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": QUESTION.format(EXAMPLE[0])},
        {"role": "assistant", "content": EXAMPLE[1]},
        {"role": "user", "content": entry["question"]},
    ]
    return {"messages": messages, "label": entry["answer"], "metadata": {"entry": entry}}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows`, complete or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    partial.replace(path)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/chain_sum"), help="folder to write")
    parser.add_argument("--min-digits", type=int, default=1, help="fewest digits of a term")
    parser.add_argument("--max-digits", type=int, default=2, help="most digits of a term")
    parser.add_argument("--num-train", type=int, default=8192, help="prompts to train on")
    parser.add_argument("--num-heldout", type=int, default=128, help="different problems to hold out")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generator")
    args = parser.parse_args(argv)
    try:
        train, heldout = split((args.min_digits, args.max_digits), args.num_train, args.num_heldout, args.seed)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("heldout", heldout)):
        write_jsonl(args.out / f"{name}.jsonl", [row(entry) for entry in part])
        print(f"wrote {args.out / name}.jsonl: {len(part)} prompts, {len(set(map(problem_key, part)))} problems")


if __name__ == "__main__":
    main()
