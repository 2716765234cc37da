"""Numbers that follow from the settings: pure functions, each said once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.config import Config
from vime.config.dtype import run_dtype
from vime.config.eval_sets import eval_sets
from vime.config.modes import evaluates_without_trainer
from vime.config.parallel import parallel_sizes
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


def transport_name(config: Config, possible: Sequence[str], *, same_node: bool) -> str:
    """--update-weight-transport, or the platform's best for where trainer and engines are.

    Args: same_node: whether shared memory reaches from the sender to every engine.
    Raises: ConfigError if shared memory is wanted where it does not reach.
    """
    wanted = config.sync.update_weight_transport
    if wanted == "shm" and not same_node:
        raise ConfigError(
            "--update-weight-transport is shm, but engines are on another node than training rank 0; use gloo, or disk "
            "with --update-weight-disk-dir on a shared file system"
        )
    if wanted != "auto":
        return wanted
    return next(name for name in possible if same_node or name != "shm")
