"""The critic on devices of its own: how many ranks it has, and how they divide its work. Pure, from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.config import Config, CriticConfig
from vime.config.estimators import needs_critic
from vime.config.stages import FIELDS


@dataclass(frozen=True, slots=True)
class CriticRanks:
    """The critic's own devices."""

    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        """Its ranks."""
        return self.nodes * self.per_node


def critic_ranks(config: Config) -> CriticRanks | None:
    """None without a critic, and where it takes turns with the policy on the policy's devices."""
    nodes, per_node = config.critic.critic_num_nodes, config.critic.critic_num_gpus_per_node
    if not needs_critic(config.algo) or (nodes is None and per_node is None):
        return None
    return CriticRanks(
        nodes=1 if nodes is None else nodes,
        per_node=config.cluster.actor_num_gpus_per_node if per_node is None else per_node,
    )


def critic_layout(megatron: Mapping[str, Any], critic: CriticConfig) -> dict[str, Any]:
    """Megatron's settings with the critic's own parallel sizes in the place of the policy's."""
    settings = dict(megatron)
    if (tensor := critic.critic_tensor_model_parallel_size) is not None:
        settings |= {"tensor_model_parallel_size": tensor, "sequence_parallel": tensor > 1}
    if (pipeline := critic.critic_pipeline_model_parallel_size) is not None:
        for name in (*FIELDS, "overlap_p2p_comm", "batch_p2p_comm", "microbatch_group_size_per_vp_stage"):
            settings.pop(name, None)  # of a division into the policy's stages
        settings["pipeline_model_parallel_size"] = pipeline
    if (context := critic.critic_context_parallel_size) is not None:
        settings["context_parallel_size"] = context
    return settings
