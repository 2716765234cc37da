"""The rollout stream of a run, as its settings say."""

from __future__ import annotations

from vime.config import Config
from vime.protocols import DataSource, RolloutContext
from vime.rollout.stage import RolloutStage
from vime.rollout.stale import StaleGroups
from vime.rollout.stream import RolloutStream, StreamLimits


def make_stream(
    config: Config, context: RolloutContext, stage: RolloutStage, source: DataSource, *, num_rollout: int
) -> RolloutStream:
    """Args: num_rollout: rollouts that are left."""
    stream, batch = config.stream, config.rollout.rollout_batch_size
    return RolloutStream(
        context,
        stage,
        source,
        limits=StreamLimits(
            batch=batch,
            max_generating=stream.max_groups_in_flight or batch,
            max_staleness=stream.max_staleness,
            in_flight=stream.update_weights_in_flight,
            interval=config.sync.update_weights_interval,
        ),
        stale=StaleGroups(
            stream.max_staleness,
            stream.stale_groups,
            masks_all_but_last=config.rollout.mask_offpolicy_in_partial_rollout,
        ),
        num_groups=num_rollout * batch,
    )
