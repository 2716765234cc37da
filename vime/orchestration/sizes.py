"""Numbers that follow from the settings: pure functions, each said once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vime.config import Config
from vime.config.critic_ranks import critic_layout, critic_ranks
from vime.config.dtype import run_dtype
from vime.config.eval_sets import eval_sets
from vime.config.modes import evaluates_without_trainer
from vime.config.parallel import ParallelSizes, parallel_sizes
from vime.errors import ConfigError
from vime.weight_sync.verify import DEFAULT_TOLERANCE, ProbeTolerance

_LOAD_S = 300.0  # of loading a bucket, or of closing a sync


def probe_tolerance(config: Config, hf_config: Mapping[str, Any]) -> ProbeTolerance:
    """The dtype's, with --weight-probe-tolerance as its bound where that is given."""
    wanted, default = config.sync.weight_probe_tolerance, DEFAULT_TOLERANCE[run_dtype(config.megatron, hf_config)]
    return default if wanted is None else replace(default, bound=wanted)


def max_model_len(config: Config, hf_config: Mapping[str, Any]) -> int:
    """Tokens of prompt and response together that the engines must hold."""
    whole = int(hf_config["max_position_embeddings"])
    limits = [held_out.max_context_len for held_out in eval_sets(config)]
    if not evaluates_without_trainer(config):
        limits.append(config.rollout.rollout_max_context_len)
    return max(limit if limit is not None else whole for limit in limits)


def global_batch_size(config: Config) -> int:
    """Trajectories per optimizer step."""
    if config.train.global_batch_size is not None:
        return config.train.global_batch_size
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return samples // (config.train.num_steps_per_rollout or 1)


def steps_per_rollout(config: Config) -> int:
    """Optimizer steps that one rollout feeds."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt // global_batch_size(config)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Training ranks that work on different samples. Raises: ConfigError if `world_size` does not divide evenly."""
    return parallel_sizes(config.megatron).data(world_size)


def critic_plan_sizes(config: Config) -> tuple[ParallelSizes, int] | None:
    """Parallel sizes and data-parallel ranks of a critic on devices of its own; None where it has none."""
    if (ranks := critic_ranks(config)) is None:
        return None
    sizes = parallel_sizes(critic_layout(config.megatron, config.critic))
    return sizes, sizes.data(ranks.total)


def number_of_rollouts(config: Config, epoch_size: int | None) -> int:
    """--num-rollout, or what --num-epoch makes of the prompts.

    Raises: ConfigError when epochs are asked of a stream, or nothing would run.
    """
    rollout = config.rollout
    if rollout.num_rollout is not None:
        return rollout.num_rollout
    if epoch_size is None:
        raise ConfigError("--num-epoch needs prompts of a known number; give --num-rollout for a stream")
    return math.ceil((rollout.num_epoch or 0) * epoch_size / rollout.rollout_batch_size)


def weight_call_timeout_s(config: Config) -> float:
    """How long an engine may take over one bucket: gloo's wait for the others, the way, and the loading."""
    return 2 * config.sync.update_weight_timeout_s + _LOAD_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where the engines of a run are, seen from the trainer."""

    same_node: bool
    """Shared memory reaches from training rank 0 to every engine."""
    same_devices: bool
    """Every device of an engine has a training rank on it."""
    own_devices: bool
    """Every engine is on CUDA devices, none of them training rank 0's."""

    def obstacle(self, transport: str) -> str | None:
        """Why a transport does not reach the engines; None where it does."""
        if transport == "shm" and not self.same_node:
            return "engines are on another node than training rank 0"
        if transport == "ipc" and not self.same_devices:
            return "an engine has a device without a training rank"
        if transport == "nccl" and not self.own_devices:
            return "an engine has no CUDA device apart from training rank 0's, and NCCL wants one for each member"
        return None


def transport_name(config: Config, possible: Sequence[str], reach: Reach) -> tuple[str, str]:
    """--update-weight-transport, or the platform's best for where trainer and engines are.

    Returns: the name; which better ones do not reach, and why, in words (empty where the name was given).
    Raises: ConfigError if one is wanted that does not reach.
    """
    wanted = config.sync.update_weight_transport
    obstacles = {name: obstacle for name in possible if (obstacle := reach.obstacle(name)) is not None}
    reaching = [name for name in possible if name not in obstacles]
    if wanted == "auto":
        better = possible[: possible.index(reaching[0])]
        return reaching[0], "; ".join(f"not {name}: {obstacles[name]}" for name in better)
    if wanted in obstacles:
        raise ConfigError(
            f"--update-weight-transport is {wanted}, but {obstacles[wanted]}; use {' or '.join(reaching)} (disk needs "
            "--update-weight-disk-dir on a file system that all nodes see)"
        )
    return wanted, ""
