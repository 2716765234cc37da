"""The rollout function with its arguments bound: what the loops call `rollout`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.protocols import DataSource, RolloutContext
from vime.types import RolloutResult


class RolloutStage:
    """Calls the user's rollout function for training and for evaluation.

    Args:
        context: what hooks get as `config`.
        source: the training prompts.
        eval_source: the held-out sets, as the evaluation's rollout function expects them.
        generate_function, eval_function: `(context, rollout_id, data_source, engines, evaluation=False)`.
    """

    def __init__(
        self,
        context: RolloutContext,
        source: DataSource,
        eval_source: Any,
        generate_function: Callable[..., RolloutResult],
        eval_function: Callable[..., RolloutResult],
    ) -> None:
        self._context, self._source, self._eval_source = context, source, eval_source
        self._generate, self._evaluate = generate_function, eval_function

    def generate(self, rollout_id: int) -> RolloutResult:
        """The groups to train on."""
        return self._generate(self._context, rollout_id, self._source, self._context.engines)

    def evaluate(self, rollout_id: int) -> RolloutResult:
        """Samples and metrics of the held-out sets."""
        engines = self._context.engines
        return self._evaluate(self._context, rollout_id, self._eval_source, engines, evaluation=True)
