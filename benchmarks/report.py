"""What was measured on H200s beside what vime is to reach there.

    python -m benchmarks.report [--plot report.png]

Prints the newest accepted result of each figure (the last line that fits, in benchmarks/results) with its bar. Exit
code 0 only if every figure is there and met; the last line names those that are not. --plot draws how near each is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]
Rows = Callable[..., Row]
STEPS = 3
"""Timed, the first ones left out."""


class Missing(LookupError):
    """No result fits."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. `value` takes the accepted results; `most` and `least` are bars."""

    name: str
    value: Callable[[Results], float]
    most: float | None = None
    least: float | None = None
    shown: str = "{:.2f}"

    def is_met(self, value: float) -> bool:
        """Whether a value reaches the bar."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def reached(self, value: float) -> float:
        """How much of the bar a value is; 1 and more is met."""
        if self.most is not None:
            return self.most / value if value else math.inf
        assert self.least is not None, "a figure has a bar"
        return value / self.least

    @property
    def bar(self) -> str:
        """The bar in words."""
        return (
            f"at most {self.shown.format(self.most)}" if self.most is not None else f"{self.shown.format(self.least)}"
        )


class Results:
    """The lines of a folder of results."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder

    def newest(self, file: str, **fields: Any) -> Row:
        """The last line of a file whose fields are these. Raises: Missing."""
        path = self._folder / file
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in reversed(lines):
            row: Row = json.loads(line)
            if all(row.get(name) == value for name, value in fields.items()):
                return row
        raise Missing(f"no line of {file}")

    def step(self, layout: str = "colocated", **fields: Any) -> Row:
        """Of step_time.py, of the small model if not said otherwise."""
        return _enough(self.newest("step_time_h200.jsonl", **{"model": "qwen3-0.6b", "layout": layout} | fields))

    def trl(self) -> Row:
        """Of peers/trl_step.py."""
        return _enough(self.newest("step_time_h200.jsonl", peer="trl"))

    def mfu(self, **fields: Any) -> float:
        """In whole steps; of an optimizer step alone where there are none."""
        try:
            return float(self.step(**fields)["mfu"])
        except Missing:
            return float(self.newest("train_step_h200.jsonl", **{"model": "qwen3-0.6b"} | fields)["mfu"])


def _enough(row: Row) -> Row:
    """Raises: Missing for a run that was ended before it had made the steps that a median is taken of."""
    if row["steps"] < STEPS:
        raise Missing(f"{row['steps']} steps were timed, not {STEPS}")
    return row


def _over_nccl(results: Results) -> float:
    row = results.newest("weight_sync_h200.jsonl", model="qwen3-4b", transport="nccl")
    if "broadcast_gb_per_second" not in row:
        raise Missing("what a bare broadcast moves was not measured beside it")
    return float(row["seconds"])


W2 = {"model": "qwen3-30b-a3b", "num_layers": 6}
FIGURES: Sequence[Figure] = (
    Figure("W1 step, colocated, part of TRL's best", lambda r: r.step()["step_s"] / r.trl()["step_s"], most=0.60),
    Figure("rollout tokens/s in W1's step, part of offline vLLM", lambda r: r.step()["of_offline_vllm"], least=0.92),
    Figure("training MFU, W1", lambda r: r.mfu(), least=0.45, shown="{:.1%}"),
    Figure("training MFU, W2", lambda r: r.mfu(**W2), least=0.28, shown="{:.1%}"),
    Figure(
        "weight sync, 0.6B, colocated, s",
        lambda r: r.newest("weight_sync_h200.jsonl", model="qwen3-0.6b", transport="ipc")["seconds"],
        most=0.3,
    ),
    Figure(
        "sleep and wake, 0.6B, s",
        lambda r: r.newest("sleep_wake_h200.jsonl", model="qwen3-0.6b")["sleep_and_wake_s"],
        most=0.6,
    ),
    Figure("weight sync over NCCL, two devices, 4B, s", _over_nccl, most=0.6),
    Figure("W3, one step ahead, part of the longer side", lambda r: r.step("ahead")["of_the_longer"], most=1.08),
    Figure(
        "device memory beside the engine's, W1, part of TRL's",
        lambda r: r.step()["trainer_adds_bytes"] / r.trl()["trainer_adds_bytes"],
        most=1.0,
    ),
    Figure(
        "W1's step without generation, training, transfer", lambda r: r.step()["other_share"], most=0.05, shown="{:.1%}"
    ),
)


def report(results: Results) -> tuple[str, bool]:
    """The table with its last line, and whether all is there and met."""
    lines, short, missing = [f"{'':56} {'measured':>9}  bar"], [], []
    for figure in FIGURES:
        try:
            value = figure.value(results)
        except Missing as error:
            missing.append(figure.name)
            lines.append(f"{figure.name:56} {'-':>9}  {figure.bar}  (not measured: {error})")
            continue
        met = figure.is_met(value)
        if not met:
            short.append(figure.name)
        lines.append(f"{figure.name:56} {figure.shown.format(value):>9}  {figure.bar}{'' if met else '  NOT MET'}")
    problems = [f"{what}: {'; '.join(names)}" for what, names in (("not met", short), ("missing", missing)) if names]
    lines.append(" · ".join(problems) or f"all {len(FIGURES)} figures are there and met")
    return "\n".join(lines), not problems


def plot(results: Results, path: Path) -> None:
    """Draw how much of its bar each figure is that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reached: dict[str, float] = {}
    for figure in FIGURES:
        try:
            reached[figure.name] = min(figure.reached(figure.value(results)), 3.0)
        except Missing:
            reached[f"{figure.name} (not measured)"] = 0.0
    canvas, axes = pyplot.subplots(figsize=(9, 0.45 * len(reached) + 1), layout="constrained")
    names = list(reversed(reached))
    colours = ["tab:green" if reached[name] >= 1 else "tab:red" for name in names]
    axes.barh(names, [reached[name] for name in names], color=colours)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("part of the bar that is reached (1: met; cut at 3)")
    canvas.savefig(path)
    pyplot.close(canvas)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw a picture, too")
    options = parser.parse_args()
    text, whole = report(Results())
    print(text)
    if options.plot is not None:
        plot(Results(), options.plot)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
