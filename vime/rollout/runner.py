"""One group from pending to scored, within the concurrency limit; and stopping what is under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from vime.config import hook_table
from vime.config.hooks import UserFunction
from vime.data.buffer import one_sample_each, pending_again
from vime.errors import ConfigError, DataError, EngineError, HookTimeout, RewardError
from vime.observability.trace import add_span
from vime.protocols import Engines, RolloutContext, SamplingParams
from vime.rewards.score import score_samples
from vime.rollout.custom_generate import GenerateFunctions, generate_by_function, mark_failed
from vime.rollout.gate import Gate
from vime.rollout.generate import fit_context, generate_group, is_unfinished, own_copy, request_seed
from vime.rollout.requests import RequestTable, TrackedEngines
from vime.types import Group, Sample, SampleStatus

logger = logging.getLogger(__name__)

_SWEEP_S = 3.0  # between two aborts of requests that have not ended
_SWEEPS = 3
_QUIET_S = 300.0  # without a finished group, until it is said what is waited for
SAMPLE_HOOKS = "rollout.rollout_sample_hook_path"


@dataclass(slots=True)
class Outcome:
    """What became of a group. `error` is the first failure of one of its samples, `category` where it happened."""

    group: Group
    error: Exception | None = None
    category: str = ""
    is_aborted: bool = False
    fresh: Group | None = None
    """As it was started; one that was aborted is `group`."""


@dataclass(slots=True)
class _Started:
    """What is put back when a group's task is stopped."""

    fresh: Group
    """As it was started."""
    generated: Group | None = None
    """With what was generated since, before hooks and rewards; where that is kept."""


class GroupRunner:
    """Runs groups as tasks: generation, then rewards. One per call of a rollout function.

    Args:
        context: of the run.
        engines: where requests go.
        sampling: how samples are drawn, before `n`, seed and context are set.
        seed_of: the seed of a group's request.
        name: prefix of the request ids, unique among runners that share engines.
        rollout_id, evaluation: what users' functions are told.
        max_context_len: tokens of prompt and response together; None is what the engines allow.
        generate_path: dotted path of the user's generate function, if there is one.
        slots: requests that may be in flight, shared with other runners; default: --rollout-concurrency.
        gate: passed by each group for the time of its generation.
        on_generated: called when a group has been generated, or could not be.
    """

    def __init__(
        self,
        context: RolloutContext,
        engines: Engines,
        *,
        sampling: SamplingParams,
        seed_of: Callable[[Group], int | None],
        name: str,
        rollout_id: int,
        max_context_len: int | None,
        generate_path: str | None,
        slots: asyncio.Semaphore | None = None,
        evaluation: bool = False,
        gate: Gate | None = None,
        on_generated: Callable[[], None] = lambda: None,
    ) -> None:
        config = context.config
        self._context, self._engines = context, engines
        self._sampling, self._seed_of, self._name = sampling, seed_of, name
        self.rollout_id, self._evaluation = rollout_id, evaluation
        self._gate, self._on_generated = gate or Gate(), on_generated
        self._max_context_len = max_context_len
        self._functions = GenerateFunctions(config, generate_path)
        self._sample_hooks = hook_table.load_all(config, SAMPLE_HOOKS)
        self._keeps_partial = config.rollout.partial_rollout and not evaluation
        self._masks_old = config.rollout.mask_offpolicy_in_partial_rollout
        self._slots = slots or asyncio.Semaphore(config.rollout.rollout_concurrency)
        self._results: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[Outcome], _Started] = {}
        self._generated: set[asyncio.Task[Outcome]] = set()
        self._requests = RequestTable(keeps_partial=self._keeps_partial, evaluation=evaluation)
        self._in_functions: set[asyncio.Task[Outcome]] = set()

    @property
    def num_outstanding(self) -> int:
        """Groups started whose outcome was not handed out yet."""
        return len(self._tasks)

    @property
    def num_generating(self) -> int:
        """Those of them that are not generated yet; the others are being scored."""
        return len(self._tasks) - len(self._generated)

    def request_id(self, group: Group) -> str:
        """Of the one request for all of a group's samples."""
        return f"{self._name}-{group.group_id}"

    def runs_function(self, group: Group) -> bool:
        """Whether a function of the user's generates it, by requests of its own."""
        return self._functions.of(group.samples[0]) is not None

    def start(self, group: Group) -> None:
        """Begin with a group of pending samples, or go on with one that was put back with its tokens.

        One that is finished, by a run that was killed, comes out of `next_outcome` as it is.
        """
        for sample in group.samples if self._masks_old and not group.is_finished else ():
            sample.mask_response()  # what an earlier rollout has sampled
        # Users' functions may leave traces in the samples; the group that can be put back must not have them.
        fresh = _own_copy(group) if self._runs_users_code(group) and not group.is_finished else group
        started = _Started(fresh)
        task = asyncio.get_running_loop().create_task(self._run(group, started))
        self._tasks[task] = started
        task.add_done_callback(self._results.put_nowait)

    async def next_outcome(self) -> Outcome:
        """The next group to finish; an aborted one as it can be put back.

        Raises: what its task raised, if that is no matter of one sample.
        """
        while True:
            try:
                # Not wait_for: Python 3.11's returns what came in the moment of a cancellation, which is lost then.
                async with asyncio.timeout(_QUIET_S):
                    task = await self._results.get()
                break
            except TimeoutError:
                waiting = len(self._requests.ids)
                logger.warning(
                    "%s: no group finished for %g s; %d wait for the engines, %d are in custom functions, rewards or "
                    "the queue",
                    self._name,
                    _QUIET_S,
                    waiting,
                    len(self._tasks) - waiting,
                )
        started = self._tasks.pop(task)
        self._generated.discard(task)
        outcome = task.result()
        if outcome.is_aborted:
            return Outcome(self._to_put_back(started), is_aborted=True)
        outcome.fresh = started.fresh
        return outcome

    async def stop(self) -> list[Group]:
        """End everything under way. Returns: the groups without a handed-out outcome, to be put back, by group_id.

        They are pending again, or with --partial-rollout have the tokens they got so far.
        """
        self._requests.is_stopping = True
        spared = self._requests.owners - (set() if self._keeps_partial else self._in_functions)
        if self._keeps_partial:
            spared |= self._in_functions  # their next request is answered as aborted, and then they return
        for task in self._tasks:
            if task not in spared:
                task.cancel()  # waiting for a slot, in the user's function, or being scored
        pending = {task for task in self._tasks if not task.done()}
        for _ in range(_SWEEPS):
            if not pending:
                break
            # A request may reach its engine after the abort that was meant for it, so aborting is repeated.
            try:
                await self._engines.abort(self._requests.ids)
            except EngineError as error:
                logger.warning("aborting the surplus requests failed, their connections are closed instead: %s", error)
                break
            _, pending = await asyncio.wait(pending, timeout=_SWEEP_S)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        groups = [self._to_put_back(started) for started in self._tasks.values()]
        self._tasks.clear()
        self._generated.clear()
        return sorted(groups, key=lambda group: group.group_id)

    async def cancel(self) -> None:
        """End everything under way at once, because the rollout failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._generated.clear()

    def _to_put_back(self, started: _Started) -> Group:
        if started.fresh.is_finished:
            return started.fresh
        if not self._keeps_partial:
            return pending_again(started.fresh)
        group = started.generated or started.fresh
        wholly_old = self._masks_old and not any(is_unfinished(sample) for sample in group.samples)
        if wholly_old or any(sample.status is SampleStatus.FAILED for sample in group.samples):
            return pending_again(one_sample_each(started.fresh))  # nothing of it could be learnt from
        for sample in group.samples:
            if sample.status is SampleStatus.ABORTED and not sample.response_length:
                sample.status = SampleStatus.PENDING
        return group

    def _runs_users_code(self, group: Group) -> bool:
        return (
            self._functions.of(group.samples[0]) is not None
            or bool(self._sample_hooks)
            or self._context.config.reward.custom_rm_path is not None
            or bool(self._context.config.reward.rm_parts)
            or any("custom_rm_path" in sample.metadata for sample in group.samples)
        )

    async def _run(self, group: Group, started: _Started) -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        if group.is_finished:
            self._generated.add(task)
            self._on_generated()
            return Outcome(group)
        try:
            async with self._gate.passing():
                outcome = await self._generate(group, task)
        except (ConfigError, DataError):
            raise  # wrong for every group alike
        except Exception as error:  # engines fail one request at a time: it costs this group
            for sample in group.samples:
                mark_failed(sample, error)
            outcome = Outcome(group, error, "generate")
        self._generated.add(task)
        self._on_generated()
        finished = outcome.group
        if outcome.error is not None:
            return outcome
        if self._keeps_partial:
            started.generated = _own_copy(finished) if self._runs_users_code(finished) else finished
        if any(is_unfinished(sample) for sample in finished.samples):
            return Outcome(finished, is_aborted=True)
        try:
            finished = replace(finished, samples=self._hooked(finished.samples))
        except Exception as error:  # the user's code
            for sample in finished.samples:
                mark_failed(sample, error)
            return Outcome(finished, error, "sample_hook")
        begin = time.time()
        await score_samples(self._context, finished.samples)
        add_span(finished.samples, "reward", begin)
        for sample in finished.samples:
            if sample.status is SampleStatus.FAILED:
                reason = str(sample.metadata.get("error", "no reason given")).removeprefix("reward: ")
                return Outcome(finished, RewardError(reason), "reward")
        return Outcome(finished)

    def _hooked(self, samples: list[Sample]) -> list[Sample]:
        """The samples after --rollout-sample-hook-path."""
        for hook in self._sample_hooks:
            before, samples = samples, []
            for sample in before:
                ids = (sample.group_id, sample.trajectory_id)
                result = _checked(hook, hook(self._context, sample, **self._told()), sample)
                result.group_id, result.trajectory_id = ids
                if any(result is other for other in samples):
                    raise hook.broken(f"returned one Sample for sample {sample.sample_id} and one before it")
                samples.append(result)
        return samples

    def _told(self) -> dict[str, object]:
        return {"rollout_id": self.rollout_id, "evaluation": self._evaluation}

    async def _generate(self, group: Group, task: asyncio.Task[Outcome]) -> Outcome:
        seed = self._seed_of(group)
        if (function := self._functions.of(group.samples[0])) is not None:
            self._in_functions.add(task)
            try:
                generated = await generate_by_function(
                    function,
                    self._context,
                    group,
                    lambda index, sample: fit_context(
                        _with_seed(self._sampling, seed, index), len(sample.tokens), self._max_context_len
                    ),
                    evaluation=self._evaluation,
                    slots=self._slots,
                    requests=self._requests,
                    max_context_len=self._max_context_len,
                )
            finally:
                self._in_functions.discard(task)
            error = generated.error
            return Outcome(generated.group, error, "generate_timeout" if isinstance(error, HookTimeout) else "generate")
        queued = time.time()
        async with self._slots:
            add_span(group.samples, "waiting", queued)
            begin = time.time()
            await generate_group(
                TrackedEngines(self._engines, self._requests, task),
                group,
                lambda index: _with_seed(self._sampling, seed, index),
                request_id=self.request_id(group),
                tokenizer=self._context.tokenizer,
                max_context_len=self._max_context_len,
            )
            add_span(group.samples, "generate", begin)
        return Outcome(group)


def _checked(hook: UserFunction, result: object, sample: Sample) -> Sample:
    """What a sample hook returned: another sample in place of this one, or None for the same."""
    if result is None:
        result = sample
    if not isinstance(result, Sample):
        raise hook.refuse(result, "a Sample or None")
    if is_unfinished(result) or not isinstance(result.status, SampleStatus) or not isinstance(result.metadata, dict):
        raise hook.broken(
            f"gave sample {sample.sample_id} the status {result.status!r} and metadata of type "
            f"{type(result.metadata).__name__}; a finished sample with a dict is expected"
        )
    return result


def _own_copy(group: Group) -> Group:
    return replace(group, samples=[own_copy(sample) for sample in group.samples])


def _with_seed(sampling: SamplingParams, seed: int | None, index: int | None) -> SamplingParams:
    """`sampling` for a whole group (index None) or for one of its samples alone."""
    if seed is None:
        return sampling
    return replace(sampling, seed=seed if index is None else request_seed(seed, index))
