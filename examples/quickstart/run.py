"""From nothing to a model that learned by reinforcement learning: the real pipeline on a CPU, in minutes.

    python examples/quickstart/run.py [--seed 0] [--out runs/quickstart] [--one-step-ahead | --fully-async]
                                      [flags for the GRPO run]

Makes a tiny Qwen3 model and arithmetic problems, warms the model up by supervised training, runs GRPO with `train.py`
(Megatron-core, vLLM behind vllm-router, Ray), and reports held-out accuracy before and after. With --one-step-ahead
GRPO is run by `train_async.py`, with --fully-async by that with this flag. Exits with 1 when the model did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that the example also runs without an install of the package itself

MAX_BEFORE, MIN_AFTER, MIN_GAIN = 0.5, 0.75, 0.25
MAX_LOGPROB_ABS_DIFF = 1e-5  # float32 on both sides: mean of any step on the policy's own samples
STAGES = ("rollout", "rollout_wait", "make_batch", "train", "save_model", "save_hf", "rollout_pause", "update_weights")
STAGES += ("eval", "other")


class MemoryWatch(threading.Thread):
    """Samples the resident memory of this process and all below it, once a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        import psutil

        me = psutil.Process()
        while not self._stopped.wait(1.0):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue  # ended between the listing and the reading
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> float:
        """Peak in GiB. Shared pages count once per process that maps them, so the true figure is lower."""
        self._stopped.set()
        self.join()
        return self.peak_bytes / 2**30


def say(text: str) -> None:
    print(f"quickstart: {text}", flush=True)


def run_train(*arguments: str, program: str = "train.py") -> None:
    """Run train.py with these flags; its output goes to this terminal."""
    command = [sys.executable, str(ROOT / program), *arguments]
    say("$ " + " ".join(["python", program, *arguments]))
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal sent it to train.py too, which ends what it started
        process.wait()
        raise SystemExit(130) from None
    if code:
        raise SystemExit(f"quickstart: that run ended with exit code {code}; its words are above")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def summarise(records: list[dict[str, Any]], *, seconds: float, peak_rss_gib: float, versions: Any) -> dict[str, Any]:
    """The figures of summary.json from the GRPO run's metrics."""
    accuracy = [r["eval/heldout"] for r in records if r.get("eval/heldout") is not None]
    steps = [r for r in records if "perf/step_time" in r]
    name = "train/train_rollout_logprob_abs_diff"
    # Samples of an older version differ by what the policy has learnt since, too.
    fresh = [r for r in steps if r["staleness/max"] == 0]
    diffs = [r[name] for r in fresh]
    if len(accuracy) < 2 or not steps:
        raise SystemExit(f"quickstart: expected evaluations before and after, found {accuracy} in {len(steps)} steps")
    return {
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "logprob_abs_diff_mean": sum(diffs) / len(diffs),
        "logprob_abs_diff_max": max(r[f"{name}_max"] for r in fresh),
        "logprob_abs_diff_worst_step_mean": max(diffs),
        "step_seconds": {s: sum(r.get(f"perf/{s}_time", 0.0) for r in steps) / len(steps) for s in STAGES},
        "steps": len(steps),
        "seconds": seconds,
        "peak_rss_gib": peak_rss_gib,
        "versions": versions,
    }


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Reward, held-out accuracy and log-prob difference by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r for r in records if "perf/step_time" in r]
    x = [r["step"] + 1 for r in steps]
    evals = [(r["step"] + 1, r["eval/heldout"]) for r in records if r.get("eval/heldout") is not None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.plot(x, [r["rollout/raw_reward"] for r in steps], label="reward of sampled answers", color="tab:blue", lw=1)
    left.plot(*zip(*evals, strict=True), "o-", label="held-out accuracy, greedy", color="tab:orange")
    left.set(xlabel="GRPO step", ylim=(0, 1), title="The model learns to add")
    left.legend(loc="lower right")
    right.semilogy(x, [r["train/train_rollout_logprob_abs_diff"] for r in steps], label="mean")
    right.semilogy(x, [r["train/train_rollout_logprob_abs_diff_max"] for r in steps], label="max", alpha=0.6)
    right.set(xlabel="GRPO step", title="|log-prob in Megatron - in vLLM|, nats")
    right.legend()
    figure.savefig(path, dpi=110)


def check_loads(folder: Path) -> None:
    """The final checkpoint must load in transformers. Raises whatever transformers raises."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--one-step-ahead", action="store_true", help="run GRPO by train_async.py")
    order.add_argument("--fully-async", action="store_true", help="run GRPO by train_async.py --fully-async")
    options, grpo_flags = parser.parse_known_args()  # train.py refuses what it does not know
    say("a tiny Qwen3 learns two-digit addition by GRPO: Megatron-core trains, vLLM generates, on this CPU")

    from vime.platform import get_platform

    if missing := get_platform("cpu").missing():
        raise SystemExit("quickstart: this machine lacks something:\n  " + "\n  ".join(missing))
    watch = MemoryWatch()
    watch.start()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    from problems import write_problems

    train_data, heldout_data = write_problems(out / "data", seed=options.seed)
    say(f"wrote {train_data} and {heldout_data}")
    say("making the model")
    subprocess.run(
        [sys.executable, "-m", "vime.cli.main", "init-model", str(out / "model"), "--seed", str(options.seed)],
        cwd=ROOT,
        check=True,
    )
    for stale in ("warmup", "grpo"):  # of an earlier quickstart in the same folder
        shutil.rmtree(out / stale, ignore_errors=True)
    here = Path(__file__).parent.relative_to(ROOT)
    seeds = ["--seed", str(options.seed), "--rollout-seed", str(options.seed), "--platform", "cpu"]
    say("1/2 supervised warm-up")
    run_train(
        *("--config", str(here / "sft.yaml"), "--hf-checkpoint", str(out / "model"), "--prompt-data", str(train_data)),
        *("--run-dir", str(out / "warmup"), "--save-hf", str(out / "warm_model"), *seeds),
    )
    say("2/2 reinforcement learning")
    run_train(
        *("--config", str(here / "grpo.yaml"), "--hf-checkpoint", str(out / "warm_model")),
        *("--prompt-data", str(train_data), "--eval-prompt-data", "heldout", str(heldout_data)),
        *("--run-dir", str(out / "grpo"), "--save-hf", str(out / "final_model"), *seeds, *grpo_flags),
        *(("--fully-async",) if options.fully_async else ()),
        program="train_async.py" if options.one_step_ahead or options.fully_async else "train.py",
    )
    records = read_metrics(out / "grpo")
    check_loads(out / "final_model")
    versions = json.loads((out / "grpo" / "versions.json").read_text(encoding="utf-8"))
    summary = summarise(records, seconds=time.monotonic() - started, peak_rss_gib=watch.stop(), versions=versions)
    plot(records, out / "learning.png")
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    before, after = summary["accuracy_before"], summary["accuracy_after"]
    say(f"held-out accuracy, greedy: {before:.3f} after warm-up, {after:.3f} after GRPO")
    say(
        f"log-prob difference trainer/engine: mean {summary['logprob_abs_diff_mean']:.1e}, "
        f"max {summary['logprob_abs_diff_max']:.1e}; {summary['seconds']:.0f} s; peak {summary['peak_rss_gib']:.1f} GiB"
    )
    say(f"figures {out / 'summary.json'}, plot {out / 'learning.png'}, model {out / 'final_model'}, runs {out}/*/")
    if (worst := summary["logprob_abs_diff_worst_step_mean"]) > MAX_LOGPROB_ABS_DIFF:
        raise SystemExit(
            f"quickstart: trainer and engine disagree: a step's mean log-prob difference was {worst:.1e}, expected at "
            f"most {MAX_LOGPROB_ABS_DIFF:.0e}; look at {out / 'learning.png'}"
        )
    if before > MAX_BEFORE or after < MIN_AFTER or after - before < MIN_GAIN:
        raise SystemExit(
            f"quickstart: the model did not learn as it should: accuracy {before:.3f} -> {after:.3f}, expected at most "
            f"{MAX_BEFORE} before, at least {MIN_AFTER} after and a gain of {MIN_GAIN}; look at {out / 'learning.png'}"
        )


if __name__ == "__main__":
    main()
