"""Draws runs step by step: reward with held-out accuracy, the log-prob difference, the time of a step.

    python -m benchmarks.plot_runs                       # every figure of figures.yaml, as docs/results.md shows them
    python -m benchmarks.plot_runs chain_sum             # one of them
    python -m benchmarks.plot_runs --out my.svg colocated=runs/a/metrics.jsonl separate=runs/b/metrics.jsonl

A run is a file with one JSON object a step: metrics.jsonl of a run's folder, or a file of results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FIGURES = HERE / "figures.yaml"
PICTURES = HERE.parent / "docs" / "images"

REWARD, HELD_OUT = "rollout/raw_reward", "eval/"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
STEP_TIME = ("perf/step_time_without_eval_and_save", "perf/step_time")

Record = dict[str, Any]
Points = tuple[list[int], list[float]]


def read_run(path: Path) -> list[Record]:
    """A run's records in order of steps. Raises: SystemExit naming the line that is none, or a file without a step."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            record["step"] += 0
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}, line {number}, is no record of a step ({error!r}): {line[:80]}") from error
        records.append(record)
    if not any(REWARD in record for record in records):
        raise SystemExit(f"{path} holds no step with {REWARD}; give a run's metrics.jsonl")
    return sorted(records, key=lambda record: record["step"])


def points(records: Sequence[Record], *names: str) -> Points:
    """(steps, values) of the first of `names` that a record has; the first rollout is step 1."""
    found = [(r["step"] + 1, r[name]) for r in records for name in [n for n in names if n in r][:1]]
    return [step for step, _ in found], [value for _, value in found]


def held_out(records: Sequence[Record]) -> Points:
    """(steps, means over the evaluation sets); what was evaluated before the first step is at 0."""
    steps, values = [], []
    for record in records:
        scores = [v for name, v in record.items() if name.startswith(HELD_OUT) and name.count("/") == 1]
        if scores:
            steps.append(record["step"] + 1)
            values.append(sum(scores) / len(scores))
    return steps, values


def draw(runs: Mapping[str, Sequence[Record]], path: Path) -> Any:
    """Write the picture of `runs`, label -> records, in the format that the path's ending names.

    Returns: matplotlib's figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text stays text, and the same runs give the same file.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "vime", "font.size": 9, "axes.spines.top": False}
    with matplotlib.rc_context({**settings, "axes.spines.right": False}):
        figure, (reward, difference, seconds) = plt.subplots(1, 3, figsize=(11, 3.2), constrained_layout=True)
        for number, (label, records) in enumerate(runs.items()):
            color = f"C{number}"
            reward.plot(*points(records, REWARD), color=color, lw=1, alpha=0.6, label=label)
            reward.plot(*held_out(records), color=color, marker="o", ms=4, ls="none")
            difference.plot(*points(records, DIFFERENCE), color=color, lw=1)
            seconds.plot(*points(records, *STEP_TIME), color=color, lw=1)
        reward.set(title="reward (line), held-out accuracy (dots)", ylim=(0, 1))
        difference.set(title="log-prob difference, mean, nats")
        difference.set_ylim(bottom=0)
        seconds.set(title="time of a step, seconds", yscale="log")
        low, high = seconds.get_ylim()
        for axes in (reward, difference, seconds):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3, lw=0.5)
        seconds.set_yticks(
            ticks := [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= t <= high], map(str, ticks)
        )
        seconds.minorticks_off()
        if len(runs) > 1:
            reward.legend(fontsize=8, loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    return figure


def figures() -> dict[str, dict[str, str]]:
    """figures.yaml: name -> label -> file under benchmarks/."""
    return dict(yaml.safe_load(FIGURES.read_text(encoding="utf-8")))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="figures of figures.yaml, or with --out runs as LABEL=FILE")
    parser.add_argument("--out", type=Path, help="picture to write (.svg or .png) of the runs that are given")
    args = parser.parse_args(argv)
    if args.out is not None:
        files = dict(word.partition("=")[::2] for word in args.what)
        if not files or not all(files.values()):
            parser.error("--out needs runs as LABEL=FILE")
        draw({label: read_run(Path(file)) for label, file in files.items()}, args.out)
        print(f"wrote {args.out}")
        return 0
    known = figures()
    if unknown := [name for name in args.what if name not in known]:
        parser.error(f"{', '.join(unknown)}: not in {FIGURES}; there are {', '.join(known)}")
    for name in args.what or known:
        path = PICTURES / f"{name}.svg"
        draw({label: read_run(HERE / file) for label, file in known[name].items()}, path)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
