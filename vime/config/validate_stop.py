"""Checks of the rule that ends a run early (--stop-metric)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.config import Config


def check_stop_rule(config: Config, metric_problem: Callable[[str], str | None]) -> Iterator[str]:
    """Whether the metric exists and is known when a step's training ends.

    Args: metric_problem: what is wrong with a metric's name; None for one that is defined.
    """
    metric = config.train.stop_metric
    if metric is None:
        return
    if not metric.startswith(("rollout/", "train/", "custom/")):
        yield (
            f"--stop-metric is {metric}, which is not known when a step's training ends; use one of rollout/, train/ "
            "or custom/"
        )
    elif problem := metric_problem(metric):
        yield f"--stop-metric is {metric}, {problem}"
