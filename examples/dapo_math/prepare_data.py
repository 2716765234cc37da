"""Write DAPO-Math-17k and AIME 2024 as prompts: train.jsonl (about 17,400 problems) and aime-2024.jsonl (30).

    python -m examples.dapo_math.prepare_data --out data/dapo_math

The files come from the hub (BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024), or from --train and
--aime: Parquet, or JSON lines, with the columns `prompt` (chat messages), `reward_model` (its `ground_truth` is the
answer) and `extra_info`. The hub's files hold each problem many times (about 100 and 32); each is written once.

A line written has `input` (chat messages), `label` and `metadata` (`index`: the problem's id in the source). --answer
says how a response is to end: "line" keeps the data's own instruction, a last line "Answer: ..." for --rm-type dapo;
"boxed" asks for \\boxed{} instead, for --rm-type math or deepscaler.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from examples.hub_files import BadData, hub_file, read_rows, write_jsonl

SOURCES = {
    "train": ("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet"),
    "aime": ("BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet"),
}
NAMES = {"train": "train.jsonl", "aime": "aime-2024.jsonl"}
BOXED = "{problem}\n\nReason step by step, and put the final answer into \\boxed{{}}."


def rows(path: Path, *, boxed: bool) -> tuple[list[dict[str, Any]], int]:
    """Every problem of one file once, in the order of their first rows, and how many come with two answers: those are
    left out.

    Raises: BadData if a row is not what it should be.
    """
    labels: dict[str, str] = {}
    made: dict[str, dict[str, Any]] = {}
    doubtful: set[str] = set()
    for number, row in enumerate(read_rows(path, ("prompt", "reward_model", "extra_info"))):
        where = f"{path}, row {number}"
        text, label = _text(row["prompt"], where), str(row["reward_model"]["ground_truth"]).strip()
        if text in labels:
            if labels[text] != label:
                doubtful.add(text)
            continue
        if not label:
            raise BadData(f"{where}: the answer is empty")
        labels[text] = label
        content = BOXED.format(problem=problem(text, where)) if boxed else text
        made[text] = {
            "input": [{"role": "user", "content": content}],
            "label": label,
            "metadata": {"index": str((row["extra_info"] or {}).get("index", number))},
        }
    return [row for text, row in made.items() if text not in doubtful], len(doubtful)


def problem(text: str, where: str) -> str:
    """The problem without the data's instruction, which is the first and the last paragraph around it.

    Raises: BadData if they are not there, or do not speak of an answer's line.
    """
    first, _, rest = text.partition("\n\n")
    middle, _, last = rest.rpartition("\n\n")
    if not middle.strip() or "Answer:" not in first or "Answer:" not in last:
        raise BadData(f"{where}: the problem is not between two paragraphs on the answer's line: {text[:80]!r}")
    return middle.strip()


def _text(prompt: Any, where: str) -> str:
    if not (isinstance(prompt, list) and len(prompt) == 1 and prompt[0].get("role") == "user"):
        raise BadData(f"{where}: the prompt is not one message of the user's: {str(prompt)[:80]}")
    return str(prompt[0]["content"])


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns: 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("data/dapo_math"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--answer", choices=("line", "boxed"), default="line", help="how a response is to end")
    parser.add_argument("--train", type=Path, help="local file of DAPO-Math-17k, instead of the hub's")
    parser.add_argument("--aime", type=Path, help="local file of AIME-2024, instead of the hub's")
    options = parser.parse_args(argv)
    try:
        for part, (repo, name) in SOURCES.items():
            source = getattr(options, part) or hub_file(repo, name, f"--{part}")
            prompts, doubtful = rows(source, boxed=options.answer == "boxed")
            count = write_jsonl(options.out / NAMES[part], prompts)
            print(f"wrote {options.out / NAMES[part]}: {count} prompts; {doubtful} with two answers left out")
    except BadData as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
