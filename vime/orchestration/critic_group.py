"""A critic on devices of its own: its ranks, and the handle that trains policy and critic at the same time.

A rollout, from left to right; what is in one column runs at once:

    policy    old, reference log-probs |            | advantages, targets |             | optimizer steps
    critic    values                   |            |                     |             | optimizer steps
    driver                             | values --> |                     | targets --> |

Both have the same samples in the same order, so what travels are columns; the micro-batches are each group's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from vime.config import Config
from vime.loop.batch_plan import BatchPlanner
from vime.models import ModelSettings
from vime.observability.trace import Span
from vime.orchestration import sizes
from vime.orchestration.cluster import Reservation
from vime.orchestration.placement import Placement
from vime.orchestration.rank_group import RankGroup, RankWorker, wait_all
from vime.orchestration.workers import TrainerGroup
from vime.platform.base import Platform
from vime.types import Metrics, TrainBatch
from vime.weight_sync import Route


class CriticWorker(RankWorker):
    """One rank of a critic that has devices of its own."""

    def _trainer_class(self) -> Callable[..., Any]:
        from vime.trainer.megatron.critic_trainer import CriticTrainer

        return CriticTrainer


class TrainerWithCritic(TrainerGroup):
    """The policy's ranks and the critic's behind one handle that satisfies `Trainer`.

    Where trainer and engines take turns on devices, it is the policy that leaves and comes back: the critic's are
    nobody else's.

    Args: planner: of the critic's ranks.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        reservation: Reservation,
        platform: Platform,
        *,
        hf_path: str,
        total_steps: int,
        route: Route | None,
        planner: BatchPlanner,
    ) -> None:
        super().__init__(
            config,
            placement,
            reservation,
            platform,
            hf_path=hf_path,
            total_steps=total_steps,
            route=route,
        )
        self._planner = planner
        self._critic = RankGroup(
            CriticWorker,
            placement.layout.critic_ranks,
            "critic rank",
            config,
            placement,
            reservation,
            platform,
            hf_path=hf_path,
            total_steps=total_steps,
        )
        self._saving: list[RankGroup] = []

    def preload(self) -> None:
        """See `RankGroup`."""
        super().preload()
        self._critic.preload()

    def start(self) -> None:
        """See `RankGroup`."""
        super().start()
        self._critic.start()

    def wait_ready(self) -> None:
        """Block until every rank of both has its model. Raises: ConfigError for what cannot be trained."""
        super().wait_ready()
        self._critic.wait_ready()

    def values(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """See `Trainer`."""
        planned = ray.put(self._planner.planned_for_critic(batch))
        values: npt.NDArray[np.float32] = self._critic.answers("values", planned)[0]
        return values

    def train(self, batch: TrainBatch) -> Metrics:
        """See `Trainer`."""
        planned = ray.put(self._planner.planned_for_critic(batch))
        with self.lock:
            _, values = self._both(("begin_train", ray.put(batch)), ("begin_values", planned))
            targets = self.answers("critic_targets", ray.put(values))[0]
            policy, critic = self._both(("end_train",), ("train", ray.put(targets)))
            self.last_trained = batch.rollout_id
        metrics: Metrics = policy | critic
        return metrics

    def save(self, path: Path) -> None:
        """See `Trainer`."""
        self._both(("save", path), ("save", path))

    def begin_save(self, path: Path) -> None:
        """See `Trainer`."""
        self._both(("begin_save", path), ("begin_save", path))
        self._saving = [self, self._critic]

    def end_save(self, wait: bool) -> bool:
        """See `Trainer`."""
        saving, self._saving = self._saving, []  # after an error, too
        assert saving, "no checkpoint was begun"
        # The ranks of a group say the same; one that has ended is not asked again.
        self._saving = [group for group in saving if not group.answers("end_save", wait)[0]]
        return not self._saving

    def load(self, path: Path) -> None:
        """See `Trainer`."""
        self._both(("load", path), ("load", path))

    def take_critic_spans(self) -> list[list[Span]]:
        """What each of the critic's ranks was busy with since the last call; for the trace."""
        return self._critic.take_spans()

    def close(self) -> None:
        """End the ranks of both."""
        self._critic.close()
        super().close()

    def _both(self, policy: tuple[Any, ...], critic: tuple[Any, ...]) -> tuple[Any, Any]:
        """Call a method of each, with arguments, at the same time: the answers of their ranks 0.

        Raises: as soon as a rank of either fails, what it says; neither is asked again then.
        """
        with self.lock, self._critic.lock:
            of_policy, of_critic = self.ask(*policy), self._critic.ask(*critic)
            try:
                answers = wait_all(self.names(of_policy) | self._critic.names(of_critic))
            except BaseException:
                self.give_up()
                self._critic.give_up()
                raise
        return answers[0], answers[len(of_policy)]


def make_trainer(
    config: Config,
    placement: Placement,
    reservation: Reservation,
    platform: Platform,
    *,
    hf_path: str,
    model: ModelSettings,
    total_steps: int,
    route: Route | None,
) -> TrainerGroup:
    """The ranks of a run that train: the policy's, and the critic's where it has devices of its own.

    Args: model: the policy's settings.
    """
    own = sizes.critic_plan_sizes(config)
    if own is None:
        return TrainerGroup(
            config, placement, reservation, platform, hf_path=hf_path, total_steps=total_steps, route=route
        )
    parallel, dp_size = own
    planner = BatchPlanner(
        train=config.train,
        dp_size=dp_size,
        sizes=parallel,
        model=model,
        global_batch_size=sizes.global_batch_size(config),
    )
    return TrainerWithCritic(
        config,
        placement,
        reservation,
        platform,
        hf_path=hf_path,
        total_steps=total_steps,
        route=route,
        planner=planner,
    )
