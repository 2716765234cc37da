"""Figures that follow from a step's stage times. Definitions: metrics.py."""

from __future__ import annotations

from collections.abc import Mapping

from vime.observability.metrics import TRAIN_PARTS
from vime.types import Metrics

_OCCASIONAL = ("perf/save_model_time", "perf/save_hf_time", "perf/eval_time")  # stages that only some steps have


def derived_metrics(metrics: Mapping[str, float]) -> Metrics:
    """Shares of the step, from perf/step_time and the stages' times; nothing where there is no step.

    A step that saves or evaluates is measured without those stages, so that it compares with one that does not.
    """
    regular = metrics.get("perf/step_time", 0.0) - sum(metrics.get(name, 0.0) for name in _OCCASIONAL)
    if regular <= 0:
        return {}
    result: Metrics = {"perf/step_time_without_eval_and_save": regular}
    if "perf/train_time" in metrics:
        result["perf/wait_time_ratio"] = max(0.0, 1.0 - metrics["perf/train_time"] / regular)
    parts = [metrics[name] for part in TRAIN_PARTS if (name := f"perf/{part}_time") in metrics]
    if parts:
        result["perf/trainer_compute_ratio"] = sum(parts) / regular
    if "perf/engine_busy_s" in metrics:
        result["perf/engine_busy_ratio"] = min(1.0, metrics["perf/engine_busy_s"] / regular)
    return result
