"""Runs to a table, a plot and a verdict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GOAL = 0.8
METRIC = "eval/heldout"


@dataclass(frozen=True)
class Run:
    """One run of one row."""

    row: str
    seed: int
    seconds: float
    curve: Sequence[tuple[int, float]]
    """(steps taken, held-out accuracy), the first before any."""

    @property
    def before(self) -> float:
        """Accuracy of the warmed-up model."""
        return self.curve[0][1]

    @property
    def after(self) -> float:
        """Accuracy at the end."""
        return self.curve[-1][1]

    @property
    def steps_to_goal(self) -> int | None:
        """Rollouts until an evaluation first was at least GOAL."""
        return next((step for step, accuracy in self.curve if accuracy >= GOAL), None)


def read_run(row: str, seed: int, folder: Path, seconds: float) -> Run:
    """A run's curve from its metrics.jsonl. Raises: ValueError if it was not evaluated before and after."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [(int(row["step"]) + 1, row[METRIC]) for row in rows if row.get(METRIC) is not None]
    if len(curve) < 2 or curve[0][0] != 0:
        raise ValueError(f"{folder} has {len(curve)} evaluations; one before training and one after are needed")
    return Run(row, seed, seconds, curve)


def failures(names: Sequence[str], runs: Sequence[Run], seeds: int, min_gain: float) -> list[str]:
    """What is missing or did not learn, in sentences; empty when every row did."""
    found = []
    for name in names:
        of_row = [run for run in runs if run.row == name]
        if len(of_row) < seeds:
            found.append(f"{name}: {len(of_row)} of {seeds} runs ended")
        found += [
            f"{name}: accuracy {run.before:.3f} -> {run.after:.3f} with seed {run.seed}; at least {min_gain} more was "
            "expected"
            for run in of_row
            if not run.after - run.before >= min_gain
        ]
    return found


def table(names: Sequence[str], runs: Sequence[Run]) -> str:
    """Markdown: means over seeds, and the extremes where there are several."""
    lines = [f"| algorithm | runs | before | after | rollouts to {GOAL} | s a run |", "|---|---|---|---|---|---|"]
    for name in names:
        of_row = [run for run in runs if run.row == name]
        if not of_row:
            lines.append(f"| {name} | 0 | | | | |")
            continue
        goals = [run.steps_to_goal for run in of_row]
        reached = [goal for goal in goals if goal is not None]
        cells = [
            name,
            str(len(of_row)),
            _summary([run.before for run in of_row], ".3f"),
            _summary([run.after for run in of_row], ".3f"),
            (_summary(reached, ".0f") if reached else "-") + (f" ({len(reached)} of {len(goals)})" if goals else ""),
            _summary([run.seconds for run in of_row], ".0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _summary(values: Sequence[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({format(min(values), form)} to {format(max(values), form)})"


def plot(names: Sequence[str], runs: Sequence[Run], path: Path) -> None:
    """Mean accuracy over seeds by rollout, a line for each row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for name in names:
        of_row = [run for run in runs if run.row == name]
        if of_row:
            steps = [step for step, _ in of_row[0].curve]
            means = [statistics.fmean(run.curve[k][1] for run in of_row) for k in range(len(steps))]
            axes.plot(steps, means, marker="o", ms=3, label=name)
    axes.axhline(GOAL, color="grey", lw=0.5)
    axes.set(xlabel="rollouts", ylabel="held-out accuracy, greedy", ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def as_json(runs: Sequence[Run]) -> list[Mapping[str, object]]:
    """What results.json keeps."""
    return [{"row": r.row, "seed": r.seed, "seconds": round(r.seconds, 1), "curve": list(r.curve)} for r in runs]
