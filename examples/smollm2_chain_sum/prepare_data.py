"""Write problems of one of reasoning-gym's tasks as JSONL prompts: train.jsonl and heldout.jsonl.

    python examples/smollm2_chain_sum/prepare_data.py --out data/chain_sum
    python examples/smollm2_chain_sum/prepare_data.py --task simple_equations --out data/simple_equations

One line holds `messages` (the prompt), `label` (the gold answer) and `metadata.entry` (what reasoning-gym's verifier
reads). The prompt shows solved problems, so that the model writes the solution out and ends there: README.md has what
that is worth. No held-out problem occurs in train, nor does the same one written otherwise (a sum with its terms
swapped, an equation in another letter); the solved problems are in neither. Each number of digits has the same share
of both files.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One of reasoning-gym's tasks whose answers are integers, and how it is asked."""

    name: str
    """As reasoning-gym calls it."""
    settings: Mapping[str, Any]
    """Of its generator."""
    instruction: str
    """The system message."""
    shown: tuple[tuple[str, str], ...]
    """Solved problems at the prompt's head: (question, solution)."""
    key: Callable[[str], str]
    """A question -> what makes two questions the same problem."""
    num_problems: Mapping[Any, int]
    """Kind of problem -> how many different ones there are. Both files have equal shares of every kind."""
    kind: Callable[[Entry], Any] = lambda entry: None
    """The kind of an entry; tasks with one kind alone leave it."""
    num_heldout: int = 128
    """How many to hold out, where nobody says otherwise."""


def chain_sum(min_digits: int = 1, max_digits: int = 2) -> Task:
    """ "61 - 32": two terms, each kind of problem with its own number of digits."""
    return Task(
        name="chain_sum",
        settings={"min_terms": 2, "max_terms": 2, "min_digits": min_digits, "max_digits": max_digits},
        instruction="Complete the equation.",
        shown=(("State the final answer to the following arithmetic problem: 8 + 5 =", "8 + 5 = 13"),),
        key=_sum_key,
        num_problems={digits: _num_sums(digits) for digits in range(min_digits, max_digits + 1)},
        kind=lambda entry: entry["metadata"]["num_digits"],
    )


def simple_equations() -> Task:
    """ "7*k - 6 = 8": one unknown, numbers and solution from 1 to 9."""
    return Task(
        name="simple_equations",
        settings={
            "min_terms": 2,
            "max_terms": 2,
            "min_value": 1,
            "max_value": 9,
            "operators_weights": [0.5, 0.5, 0.0],
        },
        instruction="Complete the equation.",
        shown=(
            ("Determine the value of y that satisfies: 3*y + 4 = 19", "3*y = 15, y = 5"),
            ("Find the value of k in the equation: 7*k - 6 = 8", "7*k = 14, k = 2"),
        ),
        key=_equation_key,
        num_problems={None: 3 * 9**3},  # a*x + b, a*x - b and b - a*x, and the solution
    )


def lcm(max_value: int = 20) -> Task:
    """ "LCM(6, 14)": the least common multiple of two numbers from 2 to `max_value`."""
    return Task(
        name="lcm",
        settings={"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": max_value},
        instruction="Complete the equation.",
        shown=(("Find the Least Common Multiple (LCM) of these numbers: 6, 14", "LCM(6, 14) = 42"),),
        key=_numbers_key,
        num_problems={None: (max_value - 1) * max_value // 2},
        num_heldout=64,
    )


TASKS: dict[str, Callable[..., Task]] = {task.__name__: task for task in (chain_sum, simple_equations, lcm)}


def _sum_key(question: str) -> str:
    """ "4 + 9" for "... problem: 9 + 4 ="; a difference as it stands."""
    expression = question.rpartition(": ")[2].removesuffix(" =")
    return expression if "-" in expression else " + ".join(sorted(expression.split(" + ")))


def _equation_key(question: str) -> str:
    """ "7*x - 6 = 8" for "Solve for k: 7*k - 6 = 8"."""
    return re.sub("[a-z]", "x", question.rpartition(": ")[2])


def _numbers_key(question: str) -> str:
    """ "6, 14" for "... numbers: 14, 6"."""
    return ", ".join(sorted(question.rpartition(": ")[2].split(", "), key=int))


def _num_sums(digits: int) -> int:
    """How many different two-term problems there are with this many digits: sums up to order, and differences."""
    n = 10 if digits == 1 else 9 * 10 ** (digits - 1)
    return n * (n + 1) // 2 + n * n


def entries(task: Task, seed: int) -> Iterator[Entry]:
    """The task's entries, without end and in a fixed order: {question, answer, metadata}."""
    import reasoning_gym

    size = 1_000_000_000  # entries are made when they are asked for
    dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.settings)
    for index in range(size):
        yield dataset[index]


def split(task: Task, num_train: int, num_heldout: int, seed: int) -> tuple[list[Entry], list[Entry]]:
    """Entries to train on and entries held out, each with equal shares of every kind of problem.

    Args:
        task: whose problems.
        num_train: entries to train on; a problem may come up more than once, as the generator draws it (chain_sum has
            155 problems of one digit).
        num_heldout: different problems to hold out; a multiple of the number of kinds, as num_train.
        seed: of the generator. Both parts come from one stream, so no seed can make them overlap.
    Raises: ValueError if the counts do not divide, or if more than half of some kind would be held out.
    """
    kinds = len(task.num_problems)
    for name, count in (("num_train", num_train), ("num_heldout", num_heldout)):
        if count <= 0 or count % kinds:
            raise ValueError(f"{name} is {count}; give a positive multiple of {kinds}, a share per kind of problem")
    share, fewest = num_heldout // kinds, min(task.num_problems.values())
    if share > fewest // 2:
        raise ValueError(
            f"num_heldout is {num_heldout}: {share} problems of a kind, more than half of the {fewest} there are; "
            f"hold out at most {kinds * (fewest // 2)}"
        )
    shown = {task.key(question) for question, _ in task.shown}
    stream = (entry for entry in entries(task, seed) if task.key(entry["question"]) not in shown)
    heldout: dict[str, Entry] = {}
    taken: Counter[Any] = Counter()
    while len(heldout) < num_heldout:
        entry = next(stream)
        kind, key = task.kind(entry), task.key(entry["question"])
        if taken[kind] < share and key not in heldout:
            heldout[key] = entry
            taken[kind] += 1
    train: list[Entry] = []
    taken = Counter()
    while len(train) < num_train:
        entry = next(stream)
        kind = task.kind(entry)
        if taken[kind] < num_train // kinds and task.key(entry["question"]) not in heldout:
            train.append(entry)
            taken[kind] += 1
    return train, list(heldout.values())


def row(task: Task, entry: Entry) -> dict[str, Any]:
    """One JSONL line: the prompt as chat messages, the gold answer, and the entry for the verifier."""
    messages = [{"role": "system", "content": task.instruction}]
    for question, solution in task.shown:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
    messages.append({"role": "user", "content": entry["question"]})
    return {"messages": messages, "label": entry["answer"], "metadata": {"entry": entry}}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows`, complete or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    partial.replace(path)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="chain_sum", help="reasoning-gym's name of it")
    parser.add_argument("--out", type=Path, help="folder to write (default: data/TASK)")
    parser.add_argument("--min-digits", type=int, help="fewest digits of a term, of chain_sum (default: 1)")
    parser.add_argument("--max-digits", type=int, help="most digits of a term, of chain_sum (default: 2)")
    parser.add_argument("--num-train", type=int, default=8192, help="prompts to train on (default: %(default)s)")
    parser.add_argument("--num-heldout", type=int, help="different problems to hold out (default: 128; 64 of lcm)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generator (default: %(default)s)")
    args = parser.parse_args(argv)
    digits = {name: value for name in ("min_digits", "max_digits") if (value := getattr(args, name)) is not None}
    if digits and args.task != "chain_sum":
        parser.error(f"--min-digits and --max-digits are chain_sum's; {args.task} has one kind of problem")
    task = TASKS[args.task](**digits)
    num_heldout = task.num_heldout if args.num_heldout is None else args.num_heldout
    try:
        train, heldout = split(task, args.num_train, num_heldout, args.seed)
    except ValueError as error:
        parser.error(str(error))
    out = args.out or Path("data") / task.name
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("heldout", heldout)):
        write_jsonl(out / f"{name}.jsonl", [row(task, entry) for entry in part])
        different = len({task.key(entry["question"]) for entry in part})
        print(f"wrote {out / name}.jsonl: {len(part)} prompts, {different} problems")


if __name__ == "__main__":
    main()
