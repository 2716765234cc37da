"""The rollout function with its arguments bound: what the loops call `rollout`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.errors import EngineError
from vime.protocols import DataSource, RolloutContext
from vime.types import Metrics, RolloutResult


class RolloutStage:
    """Calls the user's rollout function for training and for evaluation.

    Args:
        context: what hooks get as `config`.
        source: the training prompts.
        eval_source: the held-out sets, as the evaluation's rollout function expects them.
        generate_function, eval_function: `(context, rollout_id, data_source, engines, evaluation=False)`.
        check: called when one of them failed; raises the better error if an engine's process is gone.
    """

    def __init__(
        self,
        context: RolloutContext,
        source: DataSource,
        eval_source: Any,
        generate_function: Callable[..., RolloutResult],
        eval_function: Callable[..., RolloutResult],
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._context, self._source, self._eval_source = context, source, eval_source
        self._generate, self._evaluate, self._check = generate_function, eval_function, check

    def generate(self, rollout_id: int) -> RolloutResult:
        """The groups to train on."""
        return self._call(self._generate, rollout_id, self._source)

    def evaluate(self, rollout_id: int) -> Metrics:
        """Metrics of the held-out sets."""
        return self._call(self._evaluate, rollout_id, self._eval_source, evaluation=True).metrics

    def _call(
        self, function: Callable[..., RolloutResult], rollout_id: int, source: Any, **kwargs: Any
    ) -> RolloutResult:
        try:
            return function(self._context, rollout_id, source, self._context.engines, **kwargs)
        except EngineError:
            if self._check is not None:
                self._check()
            raise
