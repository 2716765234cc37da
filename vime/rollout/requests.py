"""The requests of a rollout that engines are working on, so that its surplus can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vime.protocols import Completion, Engines, GenerateRequest


class RequestTable:
    """Requests under way, each with the task of the group that it is for.

    Args:
        keeps_partial: what an aborted request has generated so far will be gone on with in a later rollout.
        evaluation: nobody will train on what they generate, so routed experts are not asked for.
    """

    def __init__(self, *, keeps_partial: bool, evaluation: bool = False) -> None:
        self.keeps_partial, self.evaluation = keeps_partial, evaluation
        self.is_stopping = False
        self._owners: dict[str, asyncio.Task[Any]] = {}

    @property
    def ids(self) -> list[str]:
        """Of all requests under way."""
        return list(self._owners)

    @property
    def owners(self) -> set[asyncio.Task[Any]]:
        """The tasks that wait for an engine."""
        return set(self._owners.values())

    def add(self, request_id: str, owner: asyncio.Task[Any]) -> None:
        """A request begins."""
        self._owners[request_id] = owner

    def remove(self, request_id: str) -> None:
        """It has ended."""
        self._owners.pop(request_id, None)


class TrackedEngines:
    """The run's engines as one group or one call of a generate function sees them; satisfies `Engines`.

    When the rollout stops, a further request is answered at once, as aborted and empty.

    Args:
        engines: the run's.
        table: where its requests are known while they are under way.
        owner: the task of the group.
    """

    def __init__(self, engines: Engines, table: RequestTable, owner: asyncio.Task[Any]) -> None:
        self._engines, self._table, self._owner = engines, table, owner
        self.was_cut_off = False
        """A request was aborted because the rollout stopped."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `Engines`."""
        if self._table.is_stopping:
            self.was_cut_off = True
            await asyncio.sleep(0)  # a function that asks again and again must not hold up the others
            return [Completion(token_ids=(), log_probs=(), finish_reason="abort", weight_versions=())] * (
                request.sampling.n
            )
        if self._table.evaluation:
            request = replace(request, routed_experts_start=None, wants_support=False)
        self._table.add(request.request_id, self._owner)
        try:
            completions = await self._engines.generate(request)
        finally:
            self._table.remove(request.request_id)
        if self._table.is_stopping and any(c.finish_reason == "abort" for c in completions):
            self.was_cut_off = True
        return completions

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engines`."""
        await self._engines.abort(request_ids)

    async def aclose(self) -> None:
        """See `Engines`."""
        await self._engines.aclose()
