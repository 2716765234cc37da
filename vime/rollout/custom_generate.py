"""The user's generate function, once per sample: called within its time limit, its samples checked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vime.config import Config, hook_table
from vime.config.hooks import UserFunction, raised
from vime.errors import ConfigError, DataError, HookError
from vime.observability.trace import add_span
from vime.protocols import RolloutContext, SamplingParams
from vime.rollout.generate import is_unfinished, own_copy
from vime.rollout.requests import RequestTable, TrackedEngines
from vime.types import Group, Sample, SampleStatus

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # before a call is made again; doubled each time

KEY = "rollout.custom_generate_function_path"
PATH_KEY = "generate_function_path"
"""Entry of a sample's metadata that names its own generate function."""


class GenerateFunctions:
    """The run's generate function, and those that samples name by metadata.generate_function_path; once each.

    Args: path: the function of samples that name none themselves.
    """

    def __init__(self, config: Config, path: str | None) -> None:
        self._config = config
        self._default = None if path is None else hook_table.load_path(config, KEY, path)
        self._by_path: dict[str, UserFunction] = {}

    def of(self, sample: Sample) -> UserFunction | None:
        """Who generates this sample; None if the engines do. Raises: DataError for a path that cannot be used."""
        path = sample.metadata.get(PATH_KEY)
        if path is None:
            return self._default
        if path not in self._by_path:
            if not isinstance(path, str):
                raise DataError(f"sample {sample.sample_id}: metadata.{PATH_KEY} is {path!r}, not a dotted path")
            try:
                self._by_path[path] = hook_table.load_path(self._config, KEY, path)
            except ConfigError as error:
                raise DataError(f"sample {sample.sample_id}: metadata.{PATH_KEY}: {error}") from error
        return self._by_path[path]


@dataclass(frozen=True, slots=True)
class Generated:
    """What the function made of a group."""

    group: Group
    """Samples whose call failed are FAILED."""
    error: Exception | None
    """The first of their errors."""


async def generate_by_function(
    function: UserFunction,
    context: RolloutContext,
    group: Group,
    sampling: Callable[[int, Sample], SamplingParams],
    *,
    evaluation: bool,
    slots: asyncio.Semaphore,
    requests: RequestTable,
    max_context_len: int | None,
) -> Generated:
    """Call the function for each of a group's unfinished samples, each in a slot of its own.

    A function may return several samples for one: siblings, which keep the episode's group_id and trajectory_id. A call
    that raises or takes longer than --custom-generate-timeout-s is made again, with the sample as it was, up to
    --custom-generate-max-retries times; then, or when it breaks the contract, it fails its sample alone. When the
    rollout stops, calls that have not begun leave their sample as it is.

    Args:
        sampling: the sampling parameters of the i-th sample.
        requests: where the requests that the functions make are known.
        max_context_len: tokens a sample may have.
    Raises: ConfigError and DataError that the function raised, once all of the group's calls have ended.
    """
    owner = asyncio.current_task()
    assert owner is not None
    limit, retries = (
        context.config.rollout.custom_generate_timeout_s,
        context.config.rollout.custom_generate_max_retries,
    )
    options = {"evaluation": evaluation} if function.takes("evaluation") else {}

    async def one(index: int, sample: Sample) -> list[Sample]:
        if not is_unfinished(sample):
            return [sample]
        if sample.response_length and max_context_len is not None and len(sample.tokens) >= max_context_len:
            sample.status = SampleStatus.TRUNCATED  # begun in an earlier rollout, and the context is full
            return [sample]
        queued = time.time()
        ids = _Ids(sample.group_id, sample.trajectory_id, sample.sample_id)  # the function may write into the sample
        async with slots:
            if requests.is_stopping:
                return [sample]
            add_span([sample], "waiting", queued)
            begin = time.time()
            before = own_copy(sample) if requests.keeps_partial or retries else sample
            engines = TrackedEngines(context.engines, requests, owner)
            for attempt in range(retries + 1):
                try:
                    result = await function.wait(
                        replace(context, engines=engines),
                        own_copy(before) if attempt else sample,
                        sampling(index, before if attempt else sample),
                        timeout_s=limit,
                        timeout_flag="--custom-generate-timeout-s",
                        **options,
                    )
                    break
                except HookError as error:
                    if attempt == retries or requests.is_stopping:
                        raise
                    wait_s = min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S)
                    logger.warning("sample %d is generated again in %g s: %s", ids.sample, wait_s, error)
                    await asyncio.sleep(wait_s)
        siblings = _siblings(function, ids, result, max_context_len, taken)
        add_span(siblings, "generate", begin)
        return _continuable(function, before, siblings, engines) if requests.keeps_partial else siblings

    taken: dict[int, int] = {}
    calls = (one(i, s) for i, s in enumerate(group.samples))
    results = await asyncio.gather(*calls, return_exceptions=True)
    samples: list[Sample] = []
    first: Exception | None = None
    for sample, result in zip(group.samples, results, strict=True):
        if not isinstance(result, BaseException):
            samples += result
        elif isinstance(result, Exception) and not isinstance(result, ConfigError | DataError):
            first = first or result
            mark_failed(sample, result)
            samples.append(sample)
        else:
            raise result
    return Generated(replace(group, samples=samples), first)


def mark_failed(sample: Sample, error: Exception) -> None:
    """The sample cannot be used, because of this error in its generation."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.status = SampleStatus.FAILED
    sample.metadata = {**metadata, "error": f"generate: {raised(error)}"}


class _Ids(NamedTuple):
    """Of the sample that a call was made for."""

    group: int
    trajectory: int
    sample: int


def _siblings(
    function: UserFunction, ids: _Ids, result: Any, max_context_len: int | None, taken: dict[int, int]
) -> list[Sample]:
    """What the function returned, checked, with the ids of its episode.

    Args: taken: by id() the samples that other calls for this group have returned, and for which sample.
    """
    siblings = [result] if isinstance(result, Sample) else result
    if not isinstance(siblings, list) or not siblings or not all(isinstance(s, Sample) for s in siblings):
        raise function.refuse(result, "a Sample or a list of them")
    if len({id(sibling) for sibling in siblings}) < len(siblings):
        raise function.broken("returned one Sample twice; a sibling is an object of its own")
    for sibling in siblings:
        if id(sibling) in taken:
            raise function.broken(f"returned one Sample for both sample {taken[id(sibling)]} and sample {ids.sample}")
        if problem := _problem(sibling, max_context_len):
            raise function.broken(problem.format(name=f"sample {ids.sample}"))
    for sibling in siblings:
        taken[id(sibling)] = ids.sample
        sibling.group_id, sibling.trajectory_id = ids.group, ids.trajectory
        if sibling.sample_id < 0:
            sibling.sample_id = ids.sample
    return siblings


def _problem(sample: Sample, max_context_len: int | None) -> str | None:
    if sample.status is SampleStatus.PENDING:
        return "left {name} pending; set its status"
    if not isinstance(sample.status, SampleStatus):
        return f"gave {{name}} the status {sample.status!r}; a SampleStatus is expected"
    if not isinstance(sample.metadata, dict):
        return f"gave {{name}} metadata of type {type(sample.metadata).__name__}; a dict is expected"
    if not sample.tokens:
        return "gave {name} no tokens, not even those of its prompt"
    if max_context_len is not None and len(sample.tokens) > max_context_len:
        return (
            f"made {{name}} {len(sample.tokens)} tokens long, above the {max_context_len} of --rollout-max-context-len "
            "(of a held-out set: max_context_len)"
        )
    return None


def _continuable(
    function: UserFunction, before: Sample, siblings: list[Sample], engines: TrackedEngines
) -> list[Sample]:
    """What the function returned; the sample as it was before, if it was cut off and could not go on from there.

    A function goes on with one sample. Several siblings with one of them unfinished would lose their common origin.
    """
    aborted = any(s.status is SampleStatus.ABORTED for s in siblings)
    if aborted:
        return siblings if len(siblings) == 1 else [before]
    if not engines.was_cut_off:
        return siblings
    logger.warning(
        "%s ignored that its request was aborted at the end of the rollout; the sample is generated anew. Set "
        "SampleStatus.ABORTED when a completion's finish_reason is 'abort', to keep its tokens",
        function,
    )
    return [before]
