"""Live progress of a run: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from vime.observability.eval_table import set_of
from vime.observability.metrics import TRAIN_PARTS
from vime.types import Metrics

_STEP_LINE_S = 1.0  # rollouts faster than this do not each get a line,
_SHORT_RUN = 50  # unless the run has so few
_QUIET_S = 10.0  # elsewhere than on a terminal, a stage is announced when nothing was printed for so long
_DIFF = "train/train_rollout_logprob_abs_diff"
_TIME = re.compile(r"perf/[^/]+_time")


class _StandardOutput(Console):
    """Goes on where nobody reads it any more, such as a pipe to a program that has ended: the run matters more."""

    def on_broken_pipe(self) -> None:
        """Say so, and write to nowhere from now on."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        with suppress(OSError):  # it may be the same pipe
            print("vime: nobody reads the standard output any more; the run goes on", file=sys.stderr, flush=True)


class RunProgress:
    """Says what the run is doing. Use as a context manager; call `stage` at each stage and `step` after each rollout.

    On a terminal the current stage and a bar stay at the bottom while a line per rollout scrolls by. Elsewhere (a log
    file, CI) there are only lines: one per rollout, and the stage when nothing was printed for ten seconds. In a
    run of more than 50, rollouts that take less than a second share a line, but the first, the last and those with an
    evaluation get their own.

    Args:
        num_rollout: rollouts of the run; 0 until `expect` says it.
        console: rich console; default: standard output.
        clock: seconds, monotonic.
    """

    def __init__(
        self, num_rollout: int = 0, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_rollout = num_rollout
        self._console = console if console is not None else _StandardOutput(highlight=False, soft_wrap=True)
        self._clock = clock
        self._last_line = self._last_step_line = -float("inf")
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=num_rollout)

    def expect(self, num_rollout: int) -> None:
        """The run has so many rollouts, where that was not known at the start."""
        self._num_rollout = num_rollout
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=num_rollout)

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """The run is now in this stage."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)
        elif self._clock() - self._last_line >= _QUIET_S:
            self.message(f"… {name}")

    def message(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False)
        self._last_line = self._clock()

    def step(self, rollout_id: int, metrics: Metrics) -> None:
        """Print the line of a finished rollout."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=rollout_id + 1)
        special = rollout_id + 1 == self._num_rollout or any(name.startswith("eval/") for name in metrics)
        if special or 0 < self._num_rollout <= _SHORT_RUN or self._clock() - self._last_step_line >= _STEP_LINE_S:
            self._last_step_line = self._clock()
            self.message(step_line(rollout_id, self._num_rollout, metrics))


def step_line(rollout_id: int, num_rollout: int, metrics: Metrics) -> str:
    """One line of a rollout's figures; those that the metrics lack are left out.

    rollout 12/120 · reward 0.512 · log-prob diff 3.1e-07 (max 2.0e-06) · step 2.31 s (rollout 1.20, train 0.81)
    """
    width = len(str(num_rollout))
    parts = [f"rollout {rollout_id + 1:>{width}}/{num_rollout}"]
    if "rollout/raw_reward" in metrics:
        parts.append(f"reward {metrics['rollout/raw_reward']:.3f}")
    if "train/loss" in metrics and "rollout/raw_reward" not in metrics:  # supervised: the loss is what moves
        parts.append(f"loss {metrics['train/loss']:.4f}")
    if _DIFF in metrics:
        largest = f" (max {metrics[f'{_DIFF}_max']:.1e})" if f"{_DIFF}_max" in metrics else ""
        parts.append(f"log-prob diff {metrics[_DIFF]:.1e}{largest}")
    if "perf/step_time" in metrics:
        times = {n.removeprefix("perf/").removesuffix("_time"): v for n, v in metrics.items() if _TIME.fullmatch(n)}
        stages = {name: seconds for name, seconds in times.items() if name not in TRAIN_PARTS}
        total = stages.pop("step")
        longest = sorted(stages.items(), key=lambda item: -item[1])[:3]
        parts.append(f"step {total:.2f} s" + (f" ({', '.join(f'{n} {s:.2f}' for n, s in longest)})" if longest else ""))
    for name, value in metrics.items():
        if (held_out := set_of(name)) is not None:
            parts.append(f"eval {held_out} {value:.3f}")
    return " · ".join(parts)
