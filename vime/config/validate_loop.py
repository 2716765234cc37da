"""Checks of what the loop does between two rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config
from vime.config.eval_sets import has_eval_sets
from vime.config.modes import evaluates_only, generates, trains


def check_loop(config: Config, *, overlapped: bool = False) -> Iterator[str]:
    """Whether engines have the weights that the loop takes them to have, and the devices when it needs them.

    Args: overlapped: rollouts are generated while the trainer trains (train_async.py).
    """
    if evaluates_only(config) or not (trains(config) and generates(config)):
        return
    if overlapped and config.cluster.colocate:
        yield (
            "--colocate: train_async.py generates while it trains, so engines and trainer cannot take turns on the "
            "same devices; use train.py, or leave it out and give the engines devices of their own (--rollout-num-gpus)"
        )
    interval, every = config.sync.update_weights_interval, config.eval.eval_interval
    if interval > 1 and every is not None and has_eval_sets(config) and every % interval:
        yield (
            f"--eval-interval is {every}, but engines get weights every {interval} rollouts (--update-weights-interval)"
            f", so that older ones would be evaluated; use a multiple of {interval}"
        )
