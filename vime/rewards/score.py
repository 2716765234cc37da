"""The run's reward function: built-in graders, the user's own, per sample or per group; results checked."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

from vime.config import RewardConfig
from vime.config.hooks import load_hook, raised
from vime.errors import ConfigError, DataError, RewardError
from vime.protocols import RolloutContext
from vime.rewards import QUICK, REWARDS
from vime.rewards.grade import Grade
from vime.rewards.pool import GraderPool
from vime.types import Sample, SampleStatus

VERDICT_KEY = "reward_verdict"
"""Where a built-in grader's verdict is kept in a sample's metadata; it outlives the score for the metrics."""

Reward: TypeAlias = float | dict[str, float]


class Scorer:
    """A `RewardFunction` that also scores many samples at once. Build it with `make_reward_function`.

    Who scores a sample: the grader named by its own metadata.rm_type, else --custom-rm-path, else --rm-type.
    """

    def __init__(
        self, settings: RewardConfig, pool: GraderPool, custom: Callable[..., Awaitable[Any]] | None = None
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._custom = custom

    async def __call__(self, config: RolloutContext, sample: Sample) -> Reward:
        """The checked reward of one sample; the sample's own fields are left alone but for the grader's verdict.

        Raises: RewardError if the custom reward raised or gave no usable number; DataError if no grader is named or
        the label is missing. Never for a bad response.
        """
        name = self._grader_name(sample)
        if name is not None:
            grade = self._quick_grade(name, sample)
            if grade is None:
                grade = await self._pool.grade(name, sample.response, sample.label, _own_metadata(sample))
            return _keep(sample, grade)
        if self._settings.group_rm:
            raise RewardError("--group-rm scores whole groups; call the reward function's score() with the group")
        assert self._custom is not None  # _grader_name has raised otherwise
        try:
            value = await self._custom(config, sample)
        except Exception as error:  # the user's code; what it raised becomes the sample's error
            raise RewardError(f"{self._settings.custom_rm_path} raised {raised(error)}") from error
        return check_reward(value, self._settings.reward_key)

    async def score(self, config: RolloutContext, samples: Sequence[Sample]) -> None:
        """Set the reward of each of these samples of one group that has none yet; custom rewards run side by side.

        A sample whose custom reward raised or gave no usable number becomes FAILED, with the reason in
        metadata["error"]. Raises: DataError as above; RewardError only if graders cannot run at all.
        """
        waiting: list[Sample] = []
        grouped: list[Sample] = []
        for sample in samples:
            if sample.status is SampleStatus.FAILED:
                continue
            if sample.reward is not None:
                _check_given(sample, self._settings.reward_key)
                continue
            name = self._grader_name(sample)
            # Most answers are decided by string work: no task, no process, for those.
            grade = self._quick_grade(name, sample) if name is not None else None
            if grade is not None:
                sample.reward = _keep(sample, grade)
            elif name is None and self._settings.group_rm:
                grouped.append(sample)
            else:
                waiting.append(sample)
        if grouped:
            await self._score_group(config, grouped)
        if waiting:
            await asyncio.gather(*(self._score_one(config, sample) for sample in waiting))

    async def _score_one(self, config: RolloutContext, sample: Sample) -> None:
        try:
            sample.reward = await self(config, sample)
        except RewardError as error:
            if self._grader_name(sample) is not None:
                raise  # the graders cannot run: no sample's fault, and every other one would fail as well
            _fail(sample, error)

    async def _score_group(self, config: RolloutContext, samples: list[Sample]) -> None:
        assert self._custom is not None
        path = self._settings.custom_rm_path
        try:
            values = await self._custom(config, samples)
        except Exception as error:  # the user's code; what it raised becomes the samples' error
            for sample in samples:
                _fail(sample, RewardError(f"{path} raised {raised(error)}"))
            return
        if not isinstance(values, Sequence) or len(values) != len(samples):
            got = f"{len(values)} rewards" if isinstance(values, Sequence) else repr(values)[:200]
            for sample in samples:
                _fail(sample, RewardError(f"{path} gave {got} for {len(samples)} samples; return a list, one each"))
            return
        for sample, value in zip(samples, values, strict=True):
            try:
                sample.reward = check_reward(value, self._settings.reward_key)
            except RewardError as error:
                _fail(sample, error)

    def _grader_name(self, sample: Sample) -> str | None:
        """The built-in grader of this sample; None if the custom reward scores it. Raises: DataError."""
        name = sample.metadata.get("rm_type")
        if name is None:
            if self._custom is not None:
                return None
            name = self._settings.rm_type
        if name is None:
            raise DataError(
                f"nothing scores sample {sample.sample_id}: it has no metadata.rm_type, and neither --rm-type nor "
                f"--custom-rm-path is given"
            )
        if name not in REWARDS:
            raise DataError(f"sample {sample.sample_id}: metadata.rm_type: {_unknown(str(name))}")
        if sample.label is None:
            raise DataError(
                f"sample {sample.sample_id} has no label for the {name} grader; name its key by --label-key"
            )
        return str(name)

    @staticmethod
    def _quick_grade(name: str, sample: Sample) -> Grade | None:
        quick = QUICK.get(name)
        return quick(sample.response, sample.label, sample.metadata) if quick is not None else None


def make_reward_function(settings: RewardConfig, pool: GraderPool) -> Scorer:
    """The reward function of a run. Raises: ConfigError for an unknown --rm-type or an unusable --custom-rm-path."""
    problems = []
    custom = None
    if settings.rm_type is not None and settings.rm_type not in REWARDS:
        problems.append(f"--rm-type: {_unknown(settings.rm_type)}")
    if settings.group_rm and settings.custom_rm_path is None:
        problems.append("--group-rm needs --custom-rm-path: built-in graders score one sample at a time")
    if settings.custom_rm_path is not None:
        parameters = ("config", "samples" if settings.group_rm else "sample")
        try:
            custom = load_hook(settings.custom_rm_path, parameters, is_async=True)
        except ConfigError as error:
            problems += [f"--custom-rm-path: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return Scorer(settings, pool, custom)


async def score_samples(config: RolloutContext, samples: Sequence[Sample]) -> None:
    """`Scorer.score` with the context's reward function, whatever it is; a plain function is awaited per sample."""
    reward = config.reward
    if isinstance(reward, Scorer):
        await reward.score(config, samples)
        return

    async def score_one(sample: Sample) -> None:
        try:
            sample.reward = check_reward(await reward(config, sample), config.config.reward.reward_key)
        except RewardError as error:
            _fail(sample, error)

    await asyncio.gather(*(score_one(s) for s in samples if s.reward is None and s.status is not SampleStatus.FAILED))


def check_reward(value: Any, reward_key: str | None) -> Reward:
    """The reward as float or dict of floats. Raises: RewardError unless finite numbers, the key among them."""
    if isinstance(value, Mapping):
        if not value:
            raise RewardError("the reward is an empty dict")
        checked = {str(key): _number(entry, f"reward[{key!r}]") for key, entry in value.items()}
        if reward_key is not None and reward_key not in checked:
            raise RewardError(f"the reward has no {reward_key!r} (--reward-key); it has {sorted(checked)}")
        return checked
    return _number(value, "the reward")


def scalar_reward(reward: Reward | None, reward_key: str | None) -> float:
    """The number that is trained on. Raises: RewardError if there is none or a dict leaves open which."""
    if reward is None:
        raise RewardError("the sample has no reward")
    if not isinstance(reward, dict):
        return reward
    if reward_key is None:
        raise RewardError(f"the reward has {sorted(reward)}; choose one by --reward-key")
    if reward_key not in reward:
        raise RewardError(f"the reward has no {reward_key!r} (--reward-key); it has {sorted(reward)}")
    return reward[reward_key]


def _number(value: Any, what: str) -> float:
    # numpy's and torch's scalars are no Real but turn into one; strings turn into numbers, too, and must not.
    if not isinstance(value, Real) and not hasattr(value, "item"):
        raise RewardError(f"{what} is {value!r}; a finite number is expected")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"{what} is {str(value)[:200]!r}; a finite number is expected") from error
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}; a finite number is expected")
    return number


def _check_given(sample: Sample, reward_key: str | None) -> None:
    """A reward that the generate function has given already."""
    try:
        sample.reward = check_reward(sample.reward, reward_key)
    except RewardError as error:
        _fail(sample, error)


def _keep(sample: Sample, grade: Grade) -> float:
    sample.metadata[VERDICT_KEY] = grade.verdict
    return grade.score


def _own_metadata(sample: Sample) -> dict[str, Any]:
    return {key: value for key, value in sample.metadata.items() if key != VERDICT_KEY}


def _fail(sample: Sample, error: RewardError) -> None:
    sample.status = SampleStatus.FAILED
    sample.metadata["error"] = f"reward: {error}"


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, REWARDS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no reward is called {name!r}; {hint}there are {', '.join(sorted(REWARDS))}"
