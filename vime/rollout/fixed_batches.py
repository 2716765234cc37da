"""Generation in fixed batches (--deterministic): the same groups are computed together each time, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vime.data.source import take_groups
from vime.errors import ConfigError, EngineError
from vime.protocols import Completion, DataSource, Engines, GenerateRequest
from vime.rollout.kept import Kept
from vime.rollout.runner import GroupRunner
from vime.types import Group


class FixedBatches:
    """The run's engines, telling each request's place in its batch; satisfies `Engines`."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._places: dict[str, tuple[str, int, int]] = {}

    def announce(self, name: str, requests: Sequence[tuple[str, int]]) -> None:
        """Requests that come next, in any order. Args: requests: [(request_id, samples)], in the batch's order."""
        size = sum(samples for _, samples in requests)
        self._places = {request_id: (name, size, index) for index, (request_id, _) in enumerate(requests)}

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `Engines`."""
        return await self._engines.generate(replace(request, batch=self._places.pop(request.request_id)))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engines`."""
        await self._engines.abort(request_ids)

    async def aclose(self) -> None:
        """See `Engines`."""
        await self._engines.aclose()


async def collect_in_batches(
    runner: GroupRunner, batches: FixedBatches, kept: Kept, source: DataSource, *, target: int, max_size: int, name: str
) -> None:
    """Groups until `target` are kept: as many as are missing at a time, and none before those have all ended.

    Args:
        batches: the engines of `runner`.
        max_size: groups in a batch, at most.
        name: of the rollout.
    Raises: EngineError if a request fails, for one that is sent again is computed beside others; ConfigError if a row
        names a generate function.
    """
    num_batches = 0
    while len(kept.groups) < target:
        groups = take_groups(source, min(target - len(kept.groups), max_size))
        for group in groups:
            _check(runner, group)
        batches.announce(f"{name}-{num_batches}", [(runner.request_id(group), len(group.samples)) for group in groups])
        num_batches += 1
        for group in groups:
            kept.stats.start(group)
            runner.start(group)
        outcomes = [await runner.next_outcome() for _ in groups]
        for outcome in sorted(outcomes, key=lambda outcome: outcome.group.group_id):
            if outcome.is_aborted or isinstance(outcome.error, EngineError):
                raise EngineError(
                    f"group {outcome.group.group_id} could not be generated ({outcome.error or 'it was aborted'}), and "
                    "--deterministic does not try again beside other groups; resume from the last checkpoint"
                ) from outcome.error
            kept.add(outcome)


def _check(runner: GroupRunner, group: Group) -> None:
    if runner.runs_function(group):
        raise ConfigError(
            f"group {group.group_id}: its row names a generate function (metadata.generate_function_path), whose "
            "requests come when it likes; --deterministic cannot be kept: leave one of the two out"
        )
