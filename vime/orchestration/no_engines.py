"""What stands in the place of engines and weight sync where a run generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from vime.errors import EngineError
from vime.protocols import Completion, GenerateRequest
from vime.types import Metrics, PolicyVersion


class NoEngines:
    """Engines and weight sync of supervised training and of replays."""

    def __init__(self) -> None:
        self.metrics: Metrics = {}

    def publish(self, version: PolicyVersion) -> PolicyVersion:
        """Nobody to publish to: the version stays 0."""
        return 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Refused. Raises: EngineError."""
        raise EngineError(f"request {request.request_id}: this run starts no engines")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing runs."""

    async def aclose(self) -> None:
        """Nothing is open."""
