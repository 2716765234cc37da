"""Does every advantage estimator learn? The quickstart's task, from one warmed-up checkpoint, on a CPU.

    python -m benchmarks.algorithms [--quick] [--only grpo gspo] [--seeds 0 1 2] [--resume] [--out runs/algorithms]

Trains each estimator, and some variants, with the same budget by `train.py`, and grpo by `train_async.py` as well: two
runs at a time, each on cores of its own, with an engine that outlives the runs. A control with rewards that mean
nothing must not learn. Writes results.json after each run, table.md and curves.png under --out, and exits with 0 only
if every row is there and learned, asynchronous ones as well as synchronous ones. --quick trains each estimator briefly
with one seed, in less than ten minutes altogether on two free cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.algorithms import report, settings
from benchmarks.algorithms.lanes import ROOT, LaneFailed, Lanes
from vime.platform import get_platform

QUICKSTART = ROOT / "examples" / "quickstart"


def main() -> int:
    """Returns the exit code."""
    options, names = _options()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    say(f"{len(names)} rows, seeds {seeds}, in {out}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what it started, as with ctrl-C
    record = report.Record(out, resume=options.resume, note=options.note, lanes=options.lanes)
    data = _problems(out)
    model = _model(out)
    try:
        with Lanes(options.lanes, model, out) as lanes:
            warm = options.warm_model or warmed_up(lanes, model, data / "train.jsonl", out)
            budget = settings.QUICK if options.quick else settings.FULL
            # The longest first, so that no lane is left waiting for one.
            in_order = sorted(names, key=lambda name: name not in settings.LONGEST)
            jobs: list[Callable[[Sequence[str]], None]] = []
            for seed, name in itertools.product(seeds, in_order):
                flags = [*budget, *settings.flags_of(name)]
                if not record.keeps(name, seed, flags, warm):
                    jobs.append(partial(trained, lanes, record, name, seed, flags, warm, data, out))
            lanes.do(jobs)
    except LaneFailed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; every process of it was ended, and --resume goes on behind the runs that had ended")
        return 130
    runs = record.runs_of(names, seeds)
    text = report.table(names, runs)
    (out / "table.md").write_text(text, encoding="utf-8")
    report.plot(names, runs, out / "curves.png")
    print(text, flush=True)
    gain = settings.MIN_GAIN[options.quick]
    problems = report.failures(names, runs, len(seeds), gain, critics=not options.quick)
    problems += report.behind(runs, settings.AHEAD, settings.IN_TURNS)
    for problem in problems:
        say(problem)
    say(f"table, results and plot are in {out}" + ("" if problems else "; every row learned"))
    return 1 if problems else 0


def _options() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the rows it asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, no variants")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2, with --quick 0")
    parser.add_argument("--resume", action="store_true", help="keep the runs that results.json under --out has")
    parser.add_argument("--lanes", type=int, help="runs at a time; default: 2, or 1 with one core or less than 12 GiB")
    parser.add_argument("--warm-model", type=Path, help="start from this checkpoint; default: one is made")
    parser.add_argument("--note", default="", help="put into results.json, such as who else used the machine")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "algorithms")
    options = parser.parse_args()
    if options.lanes is None:
        options.lanes = most_lanes(len(os.sched_getaffinity(0)), get_platform("cpu").total_memory_bytes())
    if options.lanes < 1:
        parser.error(f"--lanes {options.lanes}: at least 1")
    table = settings.rows(with_variants=not options.quick)
    if unknown := sorted(set(options.only or ()) - set(table)):
        parser.error(f"--only {' '.join(unknown)}: the rows are {', '.join(table)}")
    return options, [name for name in table if options.only is None or name in options.only]


def most_lanes(cores: int, memory_bytes: int) -> int:
    """How many runs at a time fit: each needs a core and 6 GiB of memory."""
    return max(min(2, cores, memory_bytes // (6 << 30)), 1)


def trained(
    lanes: Lanes,
    record: report.Record,
    name: str,
    seed: int,
    flags: Sequence[str],
    warm: Path,
    data: Path,
    out: Path,
    engine: Sequence[str],
) -> None:
    """One run of one row, recorded; one that failed is said, with its words in train.log.

    Args:
        flags: of the row and the budget.
        data: folder of the problems.
        engine: the flags that lead to the engine.
    """
    folder = out / f"{name.replace(' ', '_').replace(',', '').replace(':', '')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    log = folder / "train.log"
    started = time.monotonic()
    code = lanes.train(
        *("--config", str(recipe_of(name, folder)), "--hf-checkpoint", str(warm), "--run-dir", str(folder)),
        *("--prompt-data", str(data / "train.jsonl"), "--eval-config", str(data / "heldout.yaml")),
        *("--seed", str(seed), "--rollout-seed", str(seed), "--no-save-rollouts", "--weight-probe-interval", "0"),
        *engine,
        *flags,
        log=log,
        program="train_async.py" if name in settings.AHEAD else "train.py",
    )
    if code:
        say(f"{name}, seed {seed}: ended with exit code {code}; see {log}")
        return
    run = report.read_run(name, seed, folder, time.monotonic() - started)
    record.add(run, flags, warm)
    say(f"{name}, seed {seed}: {run.before:.3f} -> {run.after:.3f} in {run.seconds:.0f} s")


def recipe_of(name: str, folder: Path) -> Path:
    """The quickstart's recipe, or a copy in `folder` without the settings that this row does not read."""
    recipe = QUICKSTART / "grpo.yaml"
    not_read = settings.NOT_READ.get(name, ())
    if not not_read:
        return recipe
    lines = recipe.read_text(encoding="utf-8").splitlines(keepends=True)
    copy = folder / "recipe.yaml"
    copy.write_text("".join(x for x in lines if x.partition(":")[0] not in not_read), encoding="utf-8")
    return copy


def warmed_up(lanes: Lanes, model: Path, train_data: Path, out: Path) -> Path:
    """The quickstart's model after its supervised warm-up; one that is there is taken."""
    warm, log = out / "warm_model", out / "warmup.log"
    if (warm / "config.json").exists():
        say(f"starting from {warm}")
        return warm
    say("supervised warm-up")
    shutil.rmtree(out / "warmup", ignore_errors=True)  # of a benchmark that was stopped
    code = lanes.train(
        *("--config", str(QUICKSTART / "sft.yaml"), "--hf-checkpoint", str(model), "--prompt-data", str(train_data)),
        *("--run-dir", str(out / "warmup"), "--save-hf", str(warm), "--seed", "0", "--rollout-seed", "0"),
        log=log,
    )
    if code:
        raise LaneFailed(f"the warm-up ended with exit code {code}; see {log}")
    return warm


def _model(out: Path) -> Path:
    """The quickstart's model before its warm-up."""
    model = out / "model"
    if not (model / "config.json").exists():
        command = [sys.executable, "-m", "vime.cli.main", "init-model", str(model), "--seed", "0"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return model


def _problems(out: Path) -> Path:
    """The folder of train.jsonl, heldout.jsonl, and heldout.yaml, which scores it whatever a row's rewards are."""
    sys.path.insert(0, str(QUICKSTART))
    from problems import write_problems

    _, heldout = write_problems(out / "data", seed=0)
    sets = {"eval": {"datasets": [{"name": report.SET, "path": str(heldout), "rm_type": "exact_match"}]}}
    (out / "data" / "heldout.yaml").write_text(json.dumps(sets), encoding="utf-8")  # JSON is YAML
    return out / "data"


_SAYING = threading.Lock()


def say(text: str) -> None:
    with _SAYING:
        print(f"algorithms: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
