"""The section of docs/algorithms.md that says what was measured: `python -m benchmarks.algorithms.page`.

Made of benchmarks/results/algorithms_cpu.json, a copy of a run's results.json; with its plot.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from benchmarks.algorithms import report, settings
from benchmarks.algorithms.lanes import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "algorithms_cpu.json"
PAGE = ROOT / "docs" / "algorithms.md"
PLOT = ROOT / "docs" / "images" / "algorithms_cpu.png"
_BEGIN, _END = "<!-- generated from benchmarks/results/algorithms_cpu.json: begin -->", "<!-- generated: end -->"


def section(results: Mapping[str, Any]) -> str:
    """Words, table and plot. Args: results: what results.json holds."""
    runs = [report.as_run(entry) for entry in results["runs"]]
    names = [name for name in settings.rows(with_variants=True) if any(run.row == name for run in runs)]
    rollouts = sorted({run.curve[-1][0] for run in runs})
    loads = [entry["load_average"] for entry in results["runs"]]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    note = f"{results['note']}. " if results["note"] else ""
    words = (
        f"{len(runs)} runs of {' or '.join(map(str, rollouts))} rollouts, {results['lanes']} at a time, on "
        f"{results['cores']} cores ({results['cpu']}). {note}The load average was {min(loads)} to {max(loads)} as "
        f"they ended. {versions}; commit {results['commit']}."
    )
    picture = f"![held-out accuracy by rollout]({PLOT.relative_to(PAGE.parent).as_posix()})"
    words = textwrap.fill(words, 130, break_long_words=False, break_on_hyphens=False)
    return f"{words}\n\n{report.table(names, runs)}\n{picture}\n"


def filled(page: str, results: Mapping[str, Any]) -> str:
    """The page with its section as the results are."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n\n{section(results)}\n{_END}{after}"


def main() -> int:
    """Write section and plot. Returns: 0."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    runs = [report.as_run(entry) for entry in results["runs"]]
    PLOT.parent.mkdir(exist_ok=True)
    report.plot(list(settings.rows(with_variants=True)), runs, PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
