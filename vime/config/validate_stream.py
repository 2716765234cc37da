"""Checks of fully asynchronous training (--fully-async)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from vime.config import Config
from vime.config.modes import DEFAULT_ROLLOUT, evaluates_only, generates, replays, trains
from vime.config.stream import StreamConfig


def check_stream(config: Config, *, overlapped: bool) -> Iterator[str]:
    """What --fully-async cannot do, and what contradicts it. Args: overlapped: train_async.py runs."""
    stream, rollout = config.stream, config.rollout
    if not stream.fully_async or evaluates_only(config):
        return
    if not overlapped:
        yield "--fully-async generates beside the training, which train.py does not; start train_async.py"
    if replays(config):
        yield "--fully-async: --load-debug-rollout-data generates nothing; drop one of the two"
    elif not (trains(config) and generates(config)):
        yield (
            "--fully-async is for a trainer beside engines, but this run has one of them alone (--loss-type sft_loss, "
            "--debug-rollout-only); drop it"
        )
    if rollout.rollout_function_path != DEFAULT_ROLLOUT:
        yield (
            f"--fully-async takes groups one by one as they are finished, but --rollout-function-path "
            f"{rollout.rollout_function_path} gives a rollout when it is whole; drop one of the two "
            "(--custom-generate-function-path works with it)"
        )
    if rollout.over_sampling_batch_size is not None:
        yield (
            f"--over-sampling-batch-size is {rollout.over_sampling_batch_size}, but --fully-async begins with a group "
            "whenever there is room, and aborts none as surplus; use --max-groups-in-flight"
        )
    interval = config.sync.update_weights_interval
    if 0 <= stream.max_staleness < interval - 1:
        yield (
            f"--max-staleness is {stream.max_staleness}, but with --update-weights-interval {interval} tokens are "
            f"{interval - 1} versions old as soon as they are sampled; use {interval - 1} or more"
        )
    allowed = (stream.max_staleness + 1) * rollout.rollout_batch_size
    if stream.max_groups_in_flight is not None and stream.max_groups_in_flight > allowed > 0:
        yield (
            f"--max-groups-in-flight is {stream.max_groups_in_flight}, but --max-staleness {stream.max_staleness} and "
            f"--rollout-batch-size {rollout.rollout_batch_size} allow {allowed}; lower it, or raise one of them"
        )
    if (
        not stream.update_weights_in_flight
        and rollout.custom_generate_function_path is not None
        and rollout.custom_generate_timeout_s is None
    ):
        yield (
            "--no-update-weights-in-flight lets each weight sync wait for every sample under way, and one call of "
            f"--custom-generate-function-path {rollout.custom_generate_function_path} that never returns would hold it "
            "for ever; say how long a sample may take with --custom-generate-timeout-s"
        )
    if stream.stale_groups == "correct" and not config.algo.corrects:
        yield "--stale-groups correct trains on whatever has been sampled, which a loss must weight; add --use-tis"


def _without(config: Config) -> bool:
    return not config.stream.fully_async


RULES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (tuple(f"stream.{f.name}" for f in fields(StreamConfig) if f.name != "fully_async"), _without, "add --fully-async"),
    (
        ("rollout.mask_offpolicy_in_partial_rollout",),
        lambda c: not c.rollout.partial_rollout and _without(c),
        "add --partial-rollout",
    ),
    (
        ("rollout.partial_rollout",),
        lambda c: c.rollout.over_sampling_batch_size is None and _without(c),
        "nothing is left over without --over-sampling-batch-size above --rollout-batch-size",
    ),
)
"""When nobody reads them."""
