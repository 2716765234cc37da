"""Does every advantage estimator learn? The quickstart's task, from one warmed-up checkpoint, on a CPU.

    python -m benchmarks.algorithms [--quick] [--only grpo gspo] [--seeds 0 1 2] [--out runs/algorithms]

Trains each estimator, and some variants, with the same budget, by `train.py` on one engine that outlives the runs.
Writes table.md, results.json and curves.png under --out, and exits with 0 only if every row is there and learned.
--quick trains each estimator briefly with one seed, in less than ten minutes altogether on two free cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.algorithms import report
from benchmarks.algorithms.settings import flags_of, rows

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
QUICK = ("--num-rollout", "24", "--eval-interval", "24", "--rollout-batch-size", "64", "--lr", "4e-4")
FULL = ("--num-rollout", "120", "--eval-interval", "10")
MIN_GAIN = {True: 0.05, False: 0.25}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, no variants")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2, with --quick 0")
    parser.add_argument("--warm-model", type=Path, help="start from this checkpoint; default: one is made")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "algorithms")
    options = parser.parse_args()
    table = rows(with_variants=not options.quick)
    if unknown := sorted(set(options.only or ()) - table.keys()):
        parser.error(f"--only {' '.join(unknown)}: the rows are {', '.join(table)}")
    names = options.only or list(table)
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    say(f"{len(names)} rows, seeds {seeds}, in {out}")
    train_data, heldout = _problems(out)
    warm = options.warm_model or warmed_up(out, train_data)
    runs: list[report.Run] = []
    with engine(warm, out) as where:
        for seed in seeds:
            for name in names:
                task = ("--prompt-data", str(train_data), "--eval-prompt-data", "heldout", str(heldout))
                budget = QUICK if options.quick else FULL
                run = trained(name, seed, out, warm, [*task, *where, *budget, *flags_of(table[name])])
                runs += [run] if run else []
    text = report.table(names, runs)
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "results.json").write_text(json.dumps(report.as_json(runs), indent=1) + "\n", encoding="utf-8")
    report.plot(names, runs, out / "curves.png")
    print(text, flush=True)
    problems = report.failures(names, runs, len(seeds), MIN_GAIN[options.quick])
    for problem in problems:
        say(problem)
    say(f"table, results and plot are in {out}" + ("" if problems else "; every row learned"))
    return 1 if problems else 0


def trained(name: str, seed: int, out: Path, warm: Path, flags: Sequence[str]) -> report.Run | None:
    """One run of one row; None if it failed, with its words in train.log."""
    folder = out / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    started = time.monotonic()
    code = train(
        *("--config", str(QUICKSTART / "grpo.yaml"), "--hf-checkpoint", str(warm), "--run-dir", str(folder)),
        *("--seed", str(seed), "--rollout-seed", str(seed), "--no-save-rollouts", "--weight-probe-interval", "0"),
        *flags,
        log=folder / "train.log",
    )
    seconds = time.monotonic() - started
    if code:
        say(f"{name}, seed {seed}: ended with exit code {code}; see {folder / 'train.log'}")
        return None
    run = report.read_run(name, seed, folder, seconds)
    say(f"{name}, seed {seed}: {run.before:.3f} -> {run.after:.3f} in {seconds:.0f} s")
    return run


def warmed_up(out: Path, train_data: Path) -> Path:
    """The quickstart's model after its supervised warm-up; one that is there is taken."""
    warm = out / "warm_model"
    if (warm / "config.json").exists():
        say(f"starting from {warm}")
        return warm
    say("supervised warm-up")
    model = out / "model"
    subprocess.run(
        [sys.executable, "-m", "vime.cli.main", "init-model", str(model), "--seed", "0"], cwd=ROOT, check=True
    )
    log = out / "warmup.log"
    code = train(
        *("--config", str(QUICKSTART / "sft.yaml"), "--hf-checkpoint", str(model), "--prompt-data", str(train_data)),
        *("--run-dir", str(out / "warmup"), "--save-hf", str(warm), "--seed", "0", "--rollout-seed", "0"),
        log=log,
    )
    if code:
        raise SystemExit(f"algorithms: the warm-up ended with exit code {code}; see {log}")
    return warm


def train(*flags: str, log: Path) -> int:
    """`train.py` with these flags; its exit code. What it says goes to a file."""
    with log.open("wb") as words:
        command = [sys.executable, "train.py", "--platform", "cpu", *flags]
        return subprocess.run(
            command, cwd=ROOT, env=_environment(), stdout=words, stderr=subprocess.STDOUT, check=False
        ).returncode


@contextmanager
def engine(model: Path, out: Path) -> Iterator[list[str]]:
    """`vime engine` serving the model's architecture to one run after the other; the flags that lead to it."""
    key = out / "engine.key"
    port = str(_free_port())
    command = [
        *(sys.executable, "-m", "vime.cli.main", "engine", "--hf-checkpoint", str(model), "--platform", "cpu"),
        *("--port", port, "--key-file", str(key), "--log-file", str(out / "engine.log")),
        *("--rollout-max-context-len", "16"),
    ]
    server = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        while b"ready" not in (line := server.stdout.readline()):
            if not line:
                raise SystemExit(f"algorithms: the engine did not start; see {out / 'engine.log'}")
        yield [
            *("--rollout-external-engine-addrs", f"127.0.0.1:{port}", "--rollout-external-engine-key-file", str(key)),
        ]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _free_port() -> int:
    from vime.engine.vllm.processes import free_port

    return free_port()


def _problems(out: Path) -> tuple[Path, Path]:
    sys.path.insert(0, str(QUICKSTART))
    from problems import write_problems

    train_data, heldout = write_problems(out / "data", seed=0)
    return train_data, heldout


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def say(text: str) -> None:
    print(f"algorithms: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
