"""Checks of the settings of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.config import Config
from vime.config.eval_sets import eval_sets, has_eval_sets
from vime.config.modes import generates
from vime.errors import ConfigError

_PREFIXES = ("rollout/", "train/", "eval/", "perf/", "custom/")


def parse_best(text: str) -> tuple[str, bool]:
    """--keep-best-checkpoint as (metric, whether more is better). Raises: ConfigError for what names no metric."""
    metric, colon, direction = text.rpartition(":")
    if not colon or direction not in ("min", "max"):
        metric, direction = text, "max"
    if not metric.startswith(_PREFIXES):
        raise ConfigError(
            f"--keep-best-checkpoint is {text!r}; give METRIC, METRIC:max or METRIC:min with a metric of a step, such "
            "as eval/heldout or train/loss:min"
        )
    return metric, direction == "max"


def check_checkpoints(config: Config, metric_problem: Callable[[str], str | None]) -> Iterator[str]:
    """What would never be found, or never be kept.

    Args: metric_problem: what is wrong with a metric's name; None for one that is defined.
    """
    best = config.checkpoint.keep_best_checkpoint
    if best is None:
        return
    try:
        metric, _ = parse_best(best)
    except ConfigError as error:
        yield from error.problems
        return
    if problem := metric_problem(metric):
        yield f"--keep-best-checkpoint is {best}, {problem}"
    elif metric.startswith("eval/") and not (generates(config) and has_eval_sets(config)):
        yield f"--keep-best-checkpoint is {best}, but nothing is evaluated; add --eval-prompt-data or --eval-config"
    elif metric.startswith("eval/"):
        yield from _check_set(config, best, metric.removeprefix("eval/"))


def _check_set(config: Config, best: str, metric: str) -> Iterator[str]:
    """Whether there is a held-out set that the metric, without "eval/", belongs to."""
    try:
        names = [held_out.name for held_out in eval_sets(config)]
    except ConfigError:
        return  # said by check_eval_sets
    if not any(metric == name or metric.startswith(f"{name}-") for name in names):
        yield f"--keep-best-checkpoint is {best}, but the held-out sets are {', '.join(names)}"
