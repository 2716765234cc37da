"""Write GSM8K as prompts: train.jsonl (7,473 problems) and test.jsonl (1,319).

    python -m examples.gsm8k.prepare_data --out data/gsm8k

The files come from the hub (openai/gsm8k), or from --train and --test: Parquet, or JSON lines, with the columns
`question` and `answer`. A line written has `input` (a chat of one message), `label` (the number after #### of the
answer) and `metadata` (`index`: the row in the source).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.hub_files import BadData, hub_file, read_rows, write_jsonl
from vime.rewards.gsm8k import grade

REPO = "openai/gsm8k"
SPLITS = {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}
TEMPLATE = "{question}\n\nReason step by step. End with a line of its own: #### and the answer as a plain number."


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts of one file. Raises: BadData on an answer without a number after ####, which no response could get
    right."""
    for index, row in enumerate(read_rows(path, ("question", "answer"))):
        label = row["answer"].rpartition("####")[2].strip()
        if "####" not in row["answer"] or not grade(f"#### {label}", label, {}).score:
            raise BadData(f"{path}, row {index}: the answer ends in no #### and number: {row['answer'][-80:]!r}")
        message = {"role": "user", "content": TEMPLATE.format(question=row["question"].strip())}
        yield {"input": [message], "label": label, "metadata": {"index": index}}


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns: 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"), help="folder to write (default: %(default)s)")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=Path, help=f"local file of the {split} split, instead of the hub's")
    options = parser.parse_args(argv)
    try:
        for split, name in SPLITS.items():
            source = getattr(options, split) or hub_file(REPO, name, f"--{split}")
            count = write_jsonl(options.out / f"{split}.jsonl", rows(source))
            print(f"wrote {options.out / split}.jsonl: {count} prompts")
    except BadData as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
