"""Which groups of a rollout are kept: those that failed are written off, those that the filter drops are replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from vime.config import hook_table
from vime.config.hooks import raised
from vime.errors import EngineError, VimeError
from vime.observability.trace import add_span
from vime.protocols import DataSource, RolloutContext
from vime.rewards.score import take_reward_metrics
from vime.rollout.filters import FilterOutput
from vime.rollout.runner import Outcome
from vime.rollout.stats import RolloutStats, trajectory_rewards
from vime.rollout.whole import kept_whole
from vime.types import Group, RolloutResult, SampleStatus

logger = logging.getLogger(__name__)

# A group that failed is replaced, but when a quarter of the batch has failed something is wrong with the run.
_MAX_FAILED_SHARE = 0.25
_FREE_FAILURES = 2  # of a small batch
_MAX_ABORTED_FACTOR = 4  # groups aborted from outside, per group wanted: each is tried again, but not for ever
_MAX_DROPPED_FACTOR = 20  # groups dropped by the filter while none was kept, per group wanted


class Kept:
    """The groups kept so far, and what became of the others.

    Args:
        target: groups that are wanted; how many may fail or be dropped goes by it.
        source: where they are from, which is told what becomes of them.
    """

    def __init__(self, context: RolloutContext, target: int, source: DataSource) -> None:
        self._context, self._source = context, source
        self._target = target
        self._reward_key = context.config.reward.reward_key
        self._filter = hook_table.load(context.config, "rollout.dynamic_sampling_filter_path")
        self._ended: list[Group] = []
        self._first_failure: Outcome | None = None
        self._num_failed = self._num_dropped = self._num_aborted = 0
        self.groups: list[Group] = []
        self.stats = RolloutStats(self._reward_key)
        for name in ("num_failed_groups", "num_aborted_groups"):
            self.stats.count(f"rollout/{name}", 0)

    def add(self, outcome: Outcome) -> bool:
        """Keep, drop or write off a finished group. Returns: whether it is kept."""
        self.stats.add(outcome.group.samples)
        self._ended.append(outcome.group)
        if outcome.error is not None:
            self._write_off(outcome)
            return False
        self._source.finished(outcome.group)
        verdict = self._judge(outcome.group)
        if verdict.keep:
            self.groups.append(outcome.group)
            return True
        self._source.dropped([outcome.group], f"filter: {verdict.reason or 'no reason given'}")
        self._num_dropped += 1
        self.stats.count(f"rollout/dynamic_filter/drop_{verdict.reason}")
        if self._num_dropped % (4 * self._target) == 0:
            logger.warning(
                "the dynamic sampling filter dropped %d groups and kept %d of the %d wanted (last reason: %s)",
                self._num_dropped,
                len(self.groups),
                self._target,
                verdict.reason,
            )
        if not self.groups and self._num_dropped >= _MAX_DROPPED_FACTOR * self._target:
            raise VimeError(
                f"the dynamic sampling filter dropped all of {self._num_dropped} groups (last reason: "
                f"{verdict.reason}); the policy may solve every prompt, or none: change the prompts or the filter"
            )
        return False

    def _judge(self, group: Group) -> FilterOutput:
        if self._filter is None:
            return FilterOutput(True)
        begin = time.time()
        verdict = self._filter(self._context, list(group.samples))
        add_span(group.samples, "filter", begin)
        if isinstance(verdict, (bool, np.bool_)):
            return FilterOutput(bool(verdict))
        if not isinstance(verdict, FilterOutput):
            raise self._filter.refuse(verdict, "a bool or a FilterOutput")
        return verdict

    def retry(self, outcome: Outcome) -> Group:
        """A group that was aborted from outside, to be generated again."""
        self._num_aborted += 1
        self.stats.count("rollout/num_aborted_groups")
        if self._num_aborted > _MAX_ABORTED_FACTOR * self._target:
            raise EngineError(f"the engines aborted {self._num_aborted} groups that nobody asked them to abort")
        return outcome.group

    def result(self, groups: Sequence[Group]) -> RolloutResult:
        """The groups to train on by group_id, and the metrics."""
        groups = sorted(groups, key=lambda group: group.group_id)
        _let_filter_samples(self._context, groups)
        _let_see_all(self._context, self._ended, self._source)
        self.stats.keep(groups)
        metrics = self.stats.metrics() | take_reward_metrics(self._context)
        rewards = [reward for group in groups for reward in trajectory_rewards(group, self._reward_key)]
        metrics["rollout/raw_reward"] = sum(rewards) / len(rewards)
        return RolloutResult(groups, metrics)

    def _write_off(self, outcome: Outcome) -> None:
        failed = [s for s in outcome.group.samples if s.status is SampleStatus.FAILED]
        self.stats.count("rollout/num_failed_groups")
        self.stats.count(f"rollout/error_cat/{outcome.category}", len(failed))
        self._first_failure = self._first_failure or outcome
        self._num_failed += 1
        self._source.dropped([outcome.group], f"failed: {outcome.category}")
        logger.warning("group %d failed and is replaced: %s", outcome.group.group_id, failed[0].metadata["error"])
        if self._num_failed > max(_FREE_FAILURES, _MAX_FAILED_SHARE * self._target):
            error = self._first_failure.error
            kind = EngineError if isinstance(error, EngineError) else VimeError
            what = raised(error) if error is not None else "no reason given"
            raise kind(
                f"{self._num_failed} groups failed while {len(self.groups)} of {self._target} were collected; the "
                f"first: {self._first_failure.category}: {what}"
            ) from error


def _let_filter_samples(context: RolloutContext, groups: list[Group]) -> None:
    """--rollout-sample-filter-path: marks samples by `remove_sample`; groups and samples stay."""
    function = hook_table.load(context.config, "rollout.rollout_sample_filter_path")
    if function is None:
        return
    with kept_whole(function, groups):
        result = function(context, groups)
    if result is not None:
        raise function.refuse(result, "None (it marks samples by remove_sample)")
    for sample in (sample for group in groups for sample in group.samples):
        if not isinstance(sample.remove_sample, bool | np.bool_):
            raise function.broken(
                f"set remove_sample of sample {sample.sample_id} to {sample.remove_sample!r}; a bool is expected"
            )


def _let_see_all(context: RolloutContext, groups: list[Group], source: DataSource) -> None:
    """--rollout-all-samples-process-path: sees every group that ended, by group_id, and the data source."""
    function = hook_table.load(context.config, "rollout.rollout_all_samples_process_path")
    if function is not None:
        with kept_whole(function, groups):
            function(context, sorted(groups, key=lambda group: group.group_id), source)
