"""One group from pending to scored, within the concurrency limit; and stopping what is under way."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vime.config.hooks import load_hook, raised
from vime.data.buffer import pending_again
from vime.errors import ConfigError, DataError, EngineError, RewardError
from vime.protocols import Engines, GenerateFunction, RolloutContext, SamplingParams
from vime.rewards.score import score_samples
from vime.rollout.generate import fit_context, generate_by_hook, generate_group, request_seed
from vime.types import Group, SampleStatus

logger = logging.getLogger(__name__)

_SWEEP_S = 3.0  # between two aborts of requests that have not ended
_SWEEPS = 3
_QUIET_S = 300.0  # without a finished group, until it is said what is waited for


@dataclass(slots=True)
class Outcome:
    """What became of a group. `error` is the first failure of one of its samples, `category` where it happened."""

    group: Group
    error: Exception | None = None
    category: str = ""
    is_aborted: bool = False


class GroupRunner:
    """Runs groups as tasks: generation, then rewards. One per call of a rollout function.

    Args:
        context: of the run.
        engines: where requests go.
        sampling: how samples are drawn, before `n`, seed and context are set.
        seed_of: the seed of a group's request.
        name: prefix of the request ids, unique among runners that share engines.
        max_context_len: tokens of prompt and response together; None is what the engines allow.
        generate_path: dotted path of the user's generate function, if there is one.
        slots: requests that may be in flight, shared with other runners; default: --rollout-concurrency.
    """

    def __init__(
        self,
        context: RolloutContext,
        engines: Engines,
        *,
        sampling: SamplingParams,
        seed_of: Callable[[Group], int | None],
        name: str,
        max_context_len: int | None,
        generate_path: str | None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        config = context.config
        self._context, self._engines = context, engines
        self._sampling, self._seed_of, self._name = sampling, seed_of, name
        self._max_context_len = max_context_len
        self._hook = _generate_hook(generate_path)
        self._runs_users_code = self._hook is not None or config.reward.custom_rm_path is not None
        self._slots = slots or asyncio.Semaphore(config.rollout.rollout_concurrency)
        self._results: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[Outcome], Group] = {}
        self._in_flight: dict[str, asyncio.Task[Any]] = {}  # by request id

    @property
    def num_outstanding(self) -> int:
        """Groups started whose outcome was not handed out yet."""
        return len(self._tasks)

    def start(self, group: Group) -> None:
        """Begin with a group of pending samples."""
        # Users' functions may leave traces in the samples; the group that can be put back must not have them.
        pristine = copy.deepcopy(group) if self._runs_users_code else group
        task = asyncio.get_running_loop().create_task(self._run(group))
        self._tasks[task] = pristine
        task.add_done_callback(self._results.put_nowait)

    async def next_outcome(self) -> Outcome:
        """The next group to finish; an aborted one as it was started, without siblings that a function made of it.

        Raises: what its task raised, if that is no matter of one sample.
        """
        while True:
            try:
                task = await asyncio.wait_for(self._results.get(), _QUIET_S)
                break
            except TimeoutError:
                logger.warning(
                    "%s: no group finished for %g s; %d wait for the engines, %d are in custom functions, rewards or "
                    "the queue",
                    self._name,
                    _QUIET_S,
                    len(self._in_flight),
                    len(self._tasks) - len(self._in_flight),
                )
        pristine = self._tasks.pop(task)
        outcome = task.result()
        return Outcome(pristine, is_aborted=True) if outcome.is_aborted else outcome

    async def stop(self) -> list[Group]:
        """End everything under way. Returns: the groups without a handed-out outcome, pending again, by group_id."""
        requests = set(self._in_flight.values())
        for task in self._tasks:
            if task not in requests:
                task.cancel()  # waiting for a slot, in the user's function, or being scored
        pending = {task for task in self._tasks if not task.done()}
        for _ in range(_SWEEPS):
            if not pending:
                break
            # A request may reach its engine after the abort that was meant for it, so aborting is repeated.
            try:
                await self._engines.abort(list(self._in_flight))
            except EngineError as error:
                logger.warning("aborting the surplus requests failed, their connections are closed instead: %s", error)
                break
            _, pending = await asyncio.wait(pending, timeout=_SWEEP_S)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        groups = [pending_again(group) for group in self._tasks.values()]
        self._tasks.clear()
        return sorted(groups, key=lambda group: group.group_id)

    async def cancel(self) -> None:
        """End everything under way at once, because the rollout failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, group: Group) -> Outcome:
        try:
            finished = await self._generate(group)
        except (ConfigError, DataError):
            raise  # wrong for every group alike
        except Exception as error:
            # Engines fail one request at a time, and a generate function may raise anything: it costs this group.
            for sample in group.samples:
                sample.status = SampleStatus.FAILED
                metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
                sample.metadata = {**metadata, "error": f"generate: {raised(error)}"}
            return Outcome(group, error, "generate")
        if any(sample.status is SampleStatus.ABORTED for sample in finished.samples):
            return Outcome(finished, is_aborted=True)
        await score_samples(self._context, finished.samples)
        for sample in finished.samples:
            if sample.status is SampleStatus.FAILED:
                return Outcome(finished, RewardError(str(sample.metadata.get("error", "no reason given"))), "reward")
        return Outcome(finished)

    async def _generate(self, group: Group) -> Group:
        sampling = fit_context(self._sampling, len(group.samples[0].tokens), self._max_context_len)
        seed = self._seed_of(group)
        if self._hook is not None:
            samples = await generate_by_hook(
                self._hook,
                self._context,
                group,
                lambda i: _with_seed(sampling, seed, i),
                self._slots,
                self._max_context_len,
            )
            return Group(group.group_id, samples)
        request_id = f"{self._name}-{group.group_id}"
        async with self._slots:
            task = asyncio.current_task()
            assert task is not None
            self._in_flight[request_id] = task
            try:
                await generate_group(
                    self._engines,
                    group,
                    _with_seed(sampling, seed, None),
                    request_id=request_id,
                    tokenizer=self._context.tokenizer,
                )
            finally:
                del self._in_flight[request_id]
        return group


def _with_seed(sampling: SamplingParams, seed: int | None, index: int | None) -> SamplingParams:
    """`sampling` for a whole group (index None) or for one of its samples alone."""
    if seed is None:
        return sampling
    return replace(sampling, seed=seed if index is None else request_seed(seed, index))


def _generate_hook(path: str | None) -> GenerateFunction | None:
    if path is None:
        return None
    hook: GenerateFunction = load_hook(path, ("config", "sample", "sampling_params"), is_async=True)
    return hook
