"""The run's reward function: who scores a sample, and what becomes of a sample that cannot be scored."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
from collections.abc import Sequence
from functools import partial

from vime.config import RewardConfig
from vime.config.hooks import UserFunction, load_hook
from vime.config.validate_reward import TOTAL, part_names
from vime.errors import ConfigError, DataError, RewardError, SampleRewardError
from vime.protocols import RolloutContext
from vime.rewards import REMOTE, REWARD_NAMES, REWARDS
from vime.rewards.checks import Reward, check_reward, scalar_reward
from vime.rewards.pool import GraderPool
from vime.rewards.remote import RemoteReward
from vime.rewards.sources import (
    VERDICT_KEY,
    BuiltInSource,
    CustomSource,
    FailedReward,
    PartsSource,
    RemoteSource,
    Scored,
    Source,
)
from vime.types import Metrics, Sample, SampleStatus


class Scorer:
    """A `RewardFunction` that also scores many samples at once. Build it with `make_reward_function`.

    Who scores a sample: the function at its own metadata.custom_rm_path, else the grader its metadata.rm_type names,
    else what the run is configured with (--custom-rm-path, --rm-parts or --rm-type).

    Args:
        settings: of the run.
        pool: for graders and plain functions.
        group: the function that scores whole groups (--group-rm).
    """

    def __init__(
        self,
        settings: RewardConfig,
        pool: GraderPool,
        *,
        run_source: Source | None = None,
        group: CustomSource | None = None,
        remote: RemoteReward | None = None,
    ) -> None:
        self._settings, self._pool = settings, pool
        self._run_source, self._group, self._remote = run_source, group, remote
        self._own_sources: dict[tuple[str, str], Source] = {}  # by metadata key and value

    async def __call__(self, config: RolloutContext, sample: Sample) -> Reward:
        """The checked reward of one sample; the sample's own fields are left alone but for the grader's verdict.

        Raises: SampleRewardError if there is no usable number for it; RewardError if graders cannot run at all;
        DataError if nothing scores the sample or its label is missing. Never for a bad response.
        """
        source = self._source(sample)
        if source is None:
            raise RewardError("--group-rm scores whole groups; call the reward function's score() with the group")
        return self._keep(sample, await self._scored(source, config, sample))

    async def score(self, config: RolloutContext, samples: Sequence[Sample]) -> None:
        """Set the reward of each of these samples of one group that has none yet; they are scored side by side.

        A sample without a usable number becomes FAILED, with the reason in metadata["error"]. Raises: DataError as
        above; RewardError only if graders cannot run at all.
        """
        waiting: list[tuple[Source, Sample]] = []
        grouped: list[Sample] = []
        for sample in samples:
            if sample.status is SampleStatus.FAILED:
                continue
            if sample.reward is not None:
                _check_given(sample, self._settings.reward_key)
                continue
            source = self._source(sample)
            if source is None:
                grouped.append(sample)
            # Most answers are decided by string work: no task, no process, for those.
            elif (scored := source.quick(sample)) is not None:
                sample.reward = self._keep(sample, scored)
            else:
                waiting.append((source, sample))
        if grouped:
            await self._score_group(config, grouped)
        if waiting:
            await asyncio.gather(*(self._score_one(source, config, sample) for source, sample in waiting))

    def take_metrics(self) -> Metrics:
        """What the reward server was asked since the last call, as rollout/remote_rm/…; empty without one."""
        counts = self._remote.take_metrics() if self._remote is not None else {}
        return {f"rollout/remote_rm/{name}": value for name, value in counts.items()}

    def close(self) -> None:
        """Close the connections to the reward server; the pool is closed by who made it."""
        if self._remote is not None:
            self._remote.close()

    async def _score_one(self, source: Source, config: RolloutContext, sample: Sample) -> None:
        try:
            sample.reward = self._keep(sample, await self._scored(source, config, sample))
        except SampleRewardError as error:
            _fail(sample, error)

    async def _scored(self, source: Source, config: RolloutContext, sample: Sample) -> Scored:
        try:
            return await source.score(config, sample)
        except FailedReward as failure:
            sample.metadata[VERDICT_KEY] = failure.verdict
            if self._settings.rm_failure_reward is None:
                raise
            return Scored(self._settings.rm_failure_reward, failure.verdict)

    async def _score_group(self, config: RolloutContext, samples: list[Sample]) -> None:
        assert self._group is not None
        try:
            values = await self._group.value(config, samples)
        except FailedReward as failure:
            for sample in samples:
                sample.metadata[VERDICT_KEY] = failure.verdict
            if self._settings.rm_failure_reward is None:
                values = [failure] * len(samples)
            else:
                values = [self._settings.rm_failure_reward] * len(samples)
        except SampleRewardError as error:
            values = [error] * len(samples)
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(samples):
            got = f"{len(values)} rewards" if isinstance(values, Sequence) else repr(values)[:200]
            problem = f"{self._group.name} gave {got} for {len(samples)} samples; return a list, one each"
            values = [SampleRewardError(problem)] * len(samples)
        for sample, value in zip(samples, values, strict=True):
            try:
                if isinstance(value, SampleRewardError):
                    raise value
                sample.reward = self._group.checked(value)
            except SampleRewardError as error:
                _fail(sample, error)

    def _source(self, sample: Sample) -> Source | None:
        """Who scores this sample; None if the function for groups does. Raises: DataError."""
        for key in ("custom_rm_path", "rm_type"):
            if sample.metadata.get(key) is not None:
                return self._own_source(sample, key, str(sample.metadata[key]))
        if self._group is None and self._run_source is None:
            raise DataError(
                f"nothing scores sample {sample.sample_id}: it has no metadata.rm_type, and neither --rm-type, "
                f"--rm-parts nor --custom-rm-path is given"
            )
        return self._run_source

    def _own_source(self, sample: Sample, key: str, value: str) -> Source:
        source = self._own_sources.get((key, value))
        if source is None:
            try:
                if key == "custom_rm_path":
                    source = _custom(f"metadata.{key}", value, self._settings, self._pool)
                else:
                    source = _built_in(value, self._settings, self._pool, self._remote)
            except ConfigError as error:
                raise DataError(f"sample {sample.sample_id}: metadata.{key}: {error}") from error
            self._own_sources[key, value] = source
        return source

    @staticmethod
    def _keep(sample: Sample, scored: Scored) -> Reward:
        if scored.verdict is not None:
            sample.metadata[VERDICT_KEY] = scored.verdict
        return scored.reward


def make_reward_function(settings: RewardConfig, pool: GraderPool) -> Scorer:
    """The reward function of a run. Raises: ConfigError with everything wrong with the settings; `close` it."""
    problems: list[str] = []
    remote = None
    if settings.rm_url is not None:
        remote = RemoteReward(
            settings.rm_url,
            timeout_s=settings.rm_url_timeout_s,
            max_retries=settings.rm_url_max_retries,
            max_connections=settings.rm_url_max_connections,
        )
    run_source: Source | None = None
    group: CustomSource | None = None
    if settings.group_rm and settings.custom_rm_path is None:
        problems.append("--group-rm needs --custom-rm-path: built-in graders score one sample at a time")
    try:
        if settings.custom_rm_path is not None:
            argument = "samples" if settings.group_rm else "sample"
            custom = _custom("--custom-rm-path", settings.custom_rm_path, settings, pool, argument)
            run_source, group = (None, custom) if settings.group_rm else (custom, None)
    except ConfigError as error:
        problems += [f"--custom-rm-path: {problem}" for problem in error.problems]
    try:
        if settings.rm_type is not None:
            run_source = run_source or _built_in(settings.rm_type, settings, pool, remote)
    except ConfigError as error:
        problems += [f"--rm-type: {problem}" for problem in error.problems]
    try:
        if settings.rm_parts:
            run_source = _make_parts(settings, pool, remote)
    except ConfigError as error:
        problems += [f"--rm-parts: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return Scorer(settings, pool, run_source=run_source, group=group, remote=remote)


def default_reward_keys(settings: RewardConfig) -> tuple[str | None, str | None]:
    """The keys to train on and to evaluate by, where the rewards that vime makes are dicts and none is chosen."""
    if settings.reward_key is not None:
        return settings.reward_key, settings.reward_key
    if settings.rm_parts:
        return TOTAL, TOTAL
    spec = REWARDS.get(settings.rm_type or "")
    return (spec.entries[0], spec.entries[-1]) if spec is not None and spec.entries else (None, None)


def reward_key_problem(settings: RewardConfig, reward_key: str | None, *, rm_type: str | None = None) -> str | None:
    """Why a dict of the run's reward, or of the built-in `rm_type`, holds no entry of this key; in words after it."""
    rm_type = rm_type or settings.rm_type
    entries: tuple[str, ...] = ()
    if rm_type is not None:
        entries = REWARDS[rm_type].entries if rm_type in REWARDS else ()
    elif settings.rm_parts:
        entries = (*part_names(settings.rm_parts), TOTAL)
    if not entries or reward_key in entries:
        return None
    given = "no key is given" if reward_key is None else f"the key is {reward_key!r}"
    return (
        f"gives {', '.join(entries)}, but {given}; choose one of them by --reward-key (in evaluation by "
        "--eval-reward-key, or reward_key of the set)"
    )


def usable_rewards(settings: RewardConfig, *, reward_key: str | None, has_label: bool) -> dict[str, str | None]:
    """What a sample's metadata.rm_type may say, and why this run cannot use it, in words after it; None where it can.

    Args: reward_key: the entry of a dict reward that counts. has_label: samples have one.
    """
    found: dict[str, str | None] = {}
    for name in REWARD_NAMES:
        if name in REMOTE:
            found[name] = None if settings.rm_url else "asks a server for rewards; give its address by --rm-url"
        elif REWARDS[name].needs_label and not has_label:
            found[name] = "compares with a label; name its key by --label-key (of a held-out set: --eval-label-key)"
        else:
            found[name] = reward_key_problem(settings, reward_key, rm_type=name)
    return found


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


def take_reward_metrics(config: RolloutContext) -> Metrics:
    """`Scorer.take_metrics` of the context's reward function, if it is one."""
    return config.reward.take_metrics() if isinstance(config.reward, Scorer) else {}


def _built_in(name: str, settings: RewardConfig, pool: GraderPool, remote: RemoteReward | None) -> Source:
    """A reward by its name. Raises: ConfigError."""
    if name in REMOTE:
        if remote is None:
            raise ConfigError(f"{name} asks a server; give its address by --rm-url")
        return RemoteSource(remote, settings.reward_key, is_boxed=name.startswith("boxed_"))
    if name not in REWARDS:
        raise ConfigError(_unknown(name))
    return BuiltInSource(name, REWARDS[name], pool)


def _make_parts(settings: RewardConfig, pool: GraderPool, remote: RemoteReward | None) -> PartsSource:
    problems: list[str] = []
    parts: dict[str, tuple[Source, float]] = {}
    numbers_only = dataclasses.replace(settings, reward_key=None)  # the key names an entry of the sum's dict
    for name, (path, weight) in zip(part_names(settings.rm_parts), settings.rm_parts.items(), strict=True):
        try:
            make = partial(_custom, "--rm-parts") if "." in path else partial(_built_in, remote=remote)
            parts[name] = (make(path, numbers_only, pool), weight)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return PartsSource(parts)


def _custom(flag: str, path: str, settings: RewardConfig, pool: GraderPool, argument: str = "sample") -> CustomSource:
    """The function at a dotted path, which came by this flag. Raises: ConfigError."""
    function = UserFunction(flag, path, load_hook(path, ("config", argument)))
    return CustomSource(function, pool, timeout_s=settings.custom_rm_timeout_s, reward_key=settings.reward_key)


def _check_given(sample: Sample, reward_key: str | None) -> None:
    """A reward that the generate function has given already."""
    try:
        sample.reward = check_reward(sample.reward, reward_key)
    except SampleRewardError as error:
        _fail(sample, error)


def _fail(sample: Sample, error: RewardError) -> None:
    sample.status = SampleStatus.FAILED
    sample.metadata["error"] = f"reward: {error}"


def _unknown(name: str) -> str:
    if name.startswith("boxed_") and name.removeprefix("boxed_") in REWARDS:
        return f"there is no {name!r}: {name.removeprefix('boxed_')} finds the answer itself; drop boxed_"
    near = difflib.get_close_matches(name, REWARD_NAMES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no reward is called {name!r}; {hint}there are {', '.join(REWARD_NAMES)}"


__all__ = [
    "VERDICT_KEY",
    "Reward",
    "Scorer",
    "check_reward",
    "default_reward_keys",
    "make_reward_function",
    "reward_key_problem",
    "scalar_reward",
    "score_samples",
    "take_reward_metrics",
    "usable_rewards",
]
