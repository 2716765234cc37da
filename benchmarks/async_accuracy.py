"""Whether fully asynchronous training learns the quickstart's task as well as synchronous training does.

    python benchmarks/async_accuracy.py [--seeds 0 1 2] [--out runs/async_accuracy] [flags for the GRPO runs]

Runs the quickstart in turns and fully asynchronously for each seed. Writes results.json, prints the held-out accuracies
before and after, and exits with 1 where the mean after the asynchronous runs lies below that of the others by more than
these are apart (their largest less their smallest; with one seed 0.03).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES: dict[str, tuple[str, ...]] = {"in turns": (), "fully asynchronous": ("--fully-async",)}
SPREAD_OF_ONE = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "async_accuracy")
    options, flags = parser.parse_known_args()
    out = options.out.resolve()
    results: dict[str, dict[str, list[float]]] = {}
    for mode, order in MODES.items():
        results[mode] = {"before": [], "after": []}
        for seed in options.seeds:
            folder = out / f"{mode.replace(' ', '_')}_{seed}"
            command = ["examples/quickstart/run.py", "--seed", str(seed), "--out", str(folder), *order, *flags]
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            for when in ("before", "after"):
                results[mode][when].append(summary[f"accuracy_{when}"])
    (out / "results.json").write_text(
        json.dumps({"seeds": options.seeds, **results}, indent=2) + "\n", encoding="utf-8"
    )
    for mode, accuracies in results.items():
        told = ", ".join(f"{b:.3f} -> {a:.3f}" for b, a in zip(accuracies["before"], accuracies["after"], strict=True))
        print(f"{mode:<20} {told}; mean {statistics.mean(accuracies['after']):.3f}")
    turns, stream = (results[mode]["after"] for mode in MODES)
    spread = max(turns) - min(turns) if len(turns) > 1 else SPREAD_OF_ONE
    if statistics.mean(stream) < statistics.mean(turns) - spread:
        raise SystemExit(f"async_accuracy: below the accuracy in turns by more than {spread:.3f}")


if __name__ == "__main__":
    main()
