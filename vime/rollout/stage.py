"""The rollout function with its arguments bound: what the loops call `rollout`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vime.config import hook_table
from vime.config.hooks import UserFunction
from vime.observability.trace import Span
from vime.protocols import DataSource, RolloutContext
from vime.rollout.meter import Reading, RolloutMeter
from vime.rollout.teacher import ServedTeacher
from vime.rollout.whole import check_whole, kept_whole
from vime.types import Group, Metrics, RolloutResult

_TRAIN, _EVAL = "rollout.rollout_function_path", "rollout.eval_function_path"
_LOG, _EVAL_LOG = "rollout.custom_rollout_log_function_path", "rollout.custom_eval_rollout_log_function_path"


@dataclass(frozen=True, slots=True)
class Begin:
    """When the generation of a rollout began."""

    start: float
    """On time.perf_counter."""
    reading: Reading | None
    """Of the engines then; None where they are not measured."""


class RolloutStage:
    """Calls the run's rollout function for training and for evaluation, and then the user's log functions.

    Args:
        context: what hooks get as `config`.
        source: the training prompts.
        eval_source: the held-out sets, as the evaluation's rollout function expects them.
        meter: measures each rollout; None where nothing is generated.
        call_off: ends what waits for the engines in event loops of other threads; None where there are none.
        teacher: scores the samples to train on; None where none is asked.
    Raises: ConfigError if one of the functions cannot be used.
    """

    def __init__(
        self,
        context: RolloutContext,
        source: DataSource,
        eval_source: Any,
        meter: RolloutMeter | None = None,
        call_off: Callable[[], None] | None = None,
        teacher: ServedTeacher | None = None,
    ) -> None:
        self._context, self._source, self._eval_source, self._meter = context, source, eval_source, meter
        self._call_off, self._teacher = call_off, teacher
        train = hook_table.load(context.config, _TRAIN)
        assert train is not None, "it has a default"
        self._generate = train
        self._evaluate = hook_table.load(context.config, _EVAL) or train
        self._log = hook_table.load(context.config, _LOG)
        self._log_eval = hook_table.load(context.config, _EVAL_LOG)

    def generate(self, rollout_id: int) -> RolloutResult:
        """The groups to train on. Raises: HookError for a rollout function that returns something else."""
        self._source.begin_rollout(self._context, rollout_id)
        begin = self.begin()
        result = self._call(self._generate, rollout_id, self._source, evaluation=False)
        return self.end(rollout_id, begin, result)[0]

    def begin(self) -> Begin:
        """What is generated from now on counts."""
        return Begin(time.perf_counter(), self._meter.start() if self._meter is not None else None)

    def end(self, rollout_id: int, begin: Begin, result: RolloutResult) -> tuple[RolloutResult, Begin]:
        """A rollout has been generated since `begin`: what remains to be done with it, whoever has made it.

        Returns: the rollout to train on, and the beginning of another where generation never stops.
        """
        start, reading = begin.start, begin.reading
        check_whole(self._generate, result.groups)
        after = Begin(time.perf_counter(), None)
        if self._meter is not None and reading is not None:
            measured, reading = self._meter.turn(reading, result.groups)
            result, after = replace(result, metrics={**measured, **result.metrics}), replace(after, reading=reading)
        if self._teacher is not None:
            result.metrics.update(self._teacher.score(result.groups))
        result.metrics.update(self._source.metrics())
        if self._log is not None:
            seconds = time.perf_counter() - start
            with kept_whole(self._log, result.groups):
                skip = self._log(self._context, rollout_id, result.groups, result.metrics, seconds)
            result.metrics = _after_log(self._log, skip, result.metrics)
        return result, after

    def call_off(self) -> None:
        """End the rollout that another thread generates, once it has asked the engines for something."""
        if self._call_off is not None:
            self._call_off()
        if self._teacher is not None:
            self._teacher.call_off()

    def take_spans(self) -> list[list[Span]]:
        """What each engine did in the rollouts since the last call; for the trace."""
        return self._meter.take_spans() if self._meter is not None else []

    def evaluate(self, rollout_id: int) -> RolloutResult:
        """Samples and metrics of the held-out sets. Raises: HookError as above."""
        result = self._call(self._evaluate, rollout_id, self._eval_source, evaluation=True)
        if self._log_eval is not None:
            with kept_whole(self._log_eval, result.groups):
                skip = self._log_eval(self._context, rollout_id, result.groups, result.metrics)
            result.metrics = _after_log(self._log_eval, skip, result.metrics)
        return result

    def _call(self, function: UserFunction, rollout_id: int, source: Any, *, evaluation: bool) -> RolloutResult:
        result = function(self._context, rollout_id, source, self._context.engines, evaluation=evaluation)
        if not isinstance(result, RolloutResult):
            raise function.refuse(result, "a RolloutResult(groups, metrics)")
        if not isinstance(result.groups, list) or not all(isinstance(group, Group) for group in result.groups):
            raise function.refuse(result.groups, "a list of Group as RolloutResult.groups")
        _check_metrics(function, result.metrics)
        return result


def _after_log(function: UserFunction, skip: Any, metrics: Metrics) -> Metrics:
    """The metrics that are logged: all, or the user's own alone."""
    if skip is not None and not isinstance(skip, bool):
        raise function.refuse(skip, "a bool or None")
    _check_metrics(function, metrics)
    return {name: value for name, value in metrics.items() if name.startswith("custom/")} if skip else metrics


def _check_metrics(function: UserFunction, metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise function.refuse(metrics, "a dict of numbers as metrics")
    for name, value in metrics.items():
        if not isinstance(name, str) or not (isinstance(value, int | float) or hasattr(value, "__float__")):
            raise function.broken(f"set the metric {name!r} to {str(value)[:200]!r}; a number is expected")
