"""Where a reward comes from: a built-in grader, the reward server, a function of the user's, parts of these."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vime.config.hooks import UserFunction
from vime.config.validate_reward import TOTAL
from vime.errors import DataError, HookTimeout, SampleRewardError, VimeError
from vime.protocols import RolloutContext
from vime.rewards.checks import Reward, check_number, check_reward
from vime.rewards.extract import last_boxed
from vime.rewards.grade import UNPARSEABLE, VERDICTS, BuiltIn, Grade, Verdict
from vime.rewards.pool import CallResult, GraderPool
from vime.rewards.remote import RemoteFailure, RemoteReward
from vime.types import Sample

VERDICT_KEY = "reward_verdict"
"""Where a grader's verdict is kept in a sample's metadata; it outlives the score for the metrics."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One sample's reward, and the verdict where the source gives one."""

    reward: Reward
    verdict: Verdict | None = None
    number: float | None = None
    """The one number of a dict that counts where the sample is a part of a sum; None where the dict has none."""


class FailedReward(SampleRewardError):
    """No reward, because what computes it hung or crashed; `verdict` says which."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict


class Source(Protocol):
    """One way to score a sample."""

    def quick(self, sample: Sample) -> Scored | None:
        """The reward, if string work decides it at once. Raises: DataError if the sample lacks what it needs."""

    async def score(self, context: RolloutContext, sample: Sample) -> Scored:
        """The reward. Raises: SampleRewardError for this sample alone; RewardError if none can be scored; DataError."""


class BuiltInSource:
    """A grader of `REWARDS`."""

    def __init__(self, name: str, spec: BuiltIn, pool: GraderPool) -> None:
        self._name, self._spec, self._pool = name, spec, pool

    def quick(self, sample: Sample) -> Scored | None:
        if sample.label is None and self._spec.needs_label:
            raise DataError(
                f"sample {sample.sample_id} has no label for the {self._name} grader; name its key by --label-key"
            )
        grade = self._spec.quick(sample.response, sample.label, sample.metadata) if self._spec.quick else None
        return None if grade is None else self._scored(grade)

    async def score(self, context: RolloutContext, sample: Sample) -> Scored:
        decided = self.quick(sample)
        if decided is not None:
            return decided
        grade = await self._pool.grade(self._name, sample.response, sample.label, own_metadata(sample))
        return self._scored(self._spec.failure(grade.verdict) if grade.verdict in ("timeout", "crashed") else grade)

    @staticmethod
    def _scored(grade: Grade) -> Scored:
        return Scored(dict(grade.entries) or grade.score, grade.verdict, grade.score)


class RemoteSource:
    """The reward server; with `is_boxed` it gets the content of the last box as the response."""

    def __init__(self, client: RemoteReward, reward_key: str | None, *, is_boxed: bool) -> None:
        self._client, self._reward_key, self._is_boxed = client, reward_key, is_boxed

    def quick(self, sample: Sample) -> Scored | None:
        if self._is_boxed and not (last_boxed(sample.response) or "").strip():
            return Scored(UNPARSEABLE.score, UNPARSEABLE.verdict)
        return None

    async def score(self, context: RolloutContext, sample: Sample) -> Scored:
        decided = self.quick(sample)
        if decided is not None:
            return decided
        request = {
            "prompt": sample.prompt,
            "response": last_boxed(sample.response) if self._is_boxed else sample.response,
            "label": sample.label,
            "metadata": own_metadata(sample),
            "group_id": sample.group_id,
            "sample_id": sample.sample_id,
        }
        try:
            answer = await self._client.score(request)
        except RemoteFailure as failure:
            raise FailedReward(str(failure), failure.verdict) from failure
        return Scored(check_reward(answer.reward, self._reward_key), answer.verdict)


class CustomSource:
    """A function of the user's: `async def` is awaited here, a plain `def` is called in a grader process.

    Args:
        function: called with the context and one sample, or a list of them.
        timeout_s: of an `async def`; a plain function has the pool's.
    """

    def __init__(self, function: UserFunction, pool: GraderPool, *, timeout_s: float, reward_key: str | None) -> None:
        self._function, self._pool, self._timeout_s, self._reward_key = function, pool, timeout_s, reward_key

    def quick(self, sample: Sample) -> Scored | None:
        return None

    async def score(self, context: RolloutContext, sample: Sample) -> Scored:
        return Scored(self.checked(await self.value(context, sample)))

    def checked(self, value: Any) -> Reward:
        """What the function gave for one sample. Raises: SampleRewardError, naming it, if it is no reward."""
        try:
            return check_reward(value, self._reward_key)
        except SampleRewardError as error:
            raise SampleRewardError(str(self._function.broken(f"gave what is no reward: {error}"))) from error

    @property
    def name(self) -> str:
        """Flag and path of the function."""
        return str(self._function)

    async def value(self, context: RolloutContext, argument: Sample | list[Sample]) -> Any:
        """What the function returns for one sample or a list, unchecked. Raises: SampleRewardError, RewardError."""
        if not is_async(self._function.function):
            return self._unpack(await self._pool.call(self._function.path, context.config, argument))
        try:
            return await self._function.wait(
                context, argument, timeout_s=self._timeout_s, timeout_flag="--custom-rm-timeout-s"
            )
        except HookTimeout as error:
            raise FailedReward(str(error), "timeout") from error
        except VimeError as error:  # the user's code; what it raised becomes the sample's error
            raise SampleRewardError(str(error)) from error

    def _unpack(self, result: CallResult) -> Any:
        if result.verdict == "timeout":
            raise FailedReward(
                f"{self._function} took more than {self._pool.timeout_s:g} s (--rm-timeout-s) and was killed", "timeout"
            )
        if result.verdict is not None:
            raise FailedReward(f"the grader process of {self._function} crashed; the log says how", result.verdict)
        if result.error is not None:
            raise SampleRewardError(f"{self._function} raised {result.error}")
        return result.value


class PartsSource:
    """A weighted sum of named parts: the reward is a dict of the parts and their "total".

    Args: parts: name -> (source, weight).
    """

    def __init__(self, parts: Mapping[str, tuple[Source, float]]) -> None:
        self._parts = dict(parts)

    def quick(self, sample: Sample) -> Scored | None:
        scored = {name: source.quick(sample) for name, (source, _) in self._parts.items()}
        done = {name: value for name, value in scored.items() if value is not None}
        return self._sum(done) if len(done) == len(scored) else None

    async def score(self, context: RolloutContext, sample: Sample) -> Scored:
        waiting = [self._score_part(name, source, context, sample) for name, (source, _) in self._parts.items()]
        # All of them to the end: a part that fails first must not leave the others running unseen.
        results = await asyncio.gather(*waiting, return_exceptions=True)
        scored: dict[str, Scored] = {}
        for name, result in zip(self._parts, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            scored[name] = result
        return self._sum(scored)

    @staticmethod
    async def _score_part(name: str, source: Source, context: RolloutContext, sample: Sample) -> Scored:
        try:
            return await source.score(context, sample)
        except FailedReward as error:
            raise FailedReward(f"part {name}: {error}", error.verdict) from error
        except SampleRewardError as error:
            raise SampleRewardError(f"part {name}: {error}") from error

    def _sum(self, scored: Mapping[str, Scored]) -> Scored:
        reward: dict[str, float] = {}
        for name, part in scored.items():
            if part.number is None and isinstance(part.reward, dict):
                raise SampleRewardError(f"part {name} gave the dict {part.reward}; a part is one number")
            reward[name] = check_number(part.reward if part.number is None else part.number, f"part {name}")
        total = sum(weight * reward[name] for name, (_, weight) in self._parts.items())
        verdicts = [part.verdict for part in scored.values() if part.verdict is not None]
        return Scored({**reward, TOTAL: total}, max(verdicts, key=VERDICTS.index, default=None))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def own_metadata(sample: Sample) -> dict[str, Any]:
    """The sample's metadata without what vime has put there."""
    return {key: value for key, value in sample.metadata.items() if key != VERDICT_KEY}


__all__ = [
    "VERDICT_KEY",
    "BuiltInSource",
    "CustomSource",
    "FailedReward",
    "PartsSource",
    "RemoteSource",
    "Scored",
    "Source",
    "is_async",
    "own_metadata",
]
