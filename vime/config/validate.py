"""Cross-checks of the whole configuration: pure, before anything starts, all problems at once.

Each check yields sentences that name the settings, their values and what to change. `unread.py` finds values that
nobody would read, `validate_files.py` looks at files and hooks, `validate_model.py` compares with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.config import Config, TrainConfig
from vime.config.critic_ranks import critic_layout, critic_ranks
from vime.config.modes import engines_return_support, evaluates_without_trainer, reads_prompts, trains
from vime.config.parallel import ParallelSizes, parallel_sizes
from vime.config.ranges import check_ranges
from vime.config.unread import unread_settings
from vime.config.unread_megatron import unread_megatron_settings
from vime.config.validate_algo import check_algorithm
from vime.config.validate_aligned import check_aligned
from vime.config.validate_checkpoint import check_checkpoints
from vime.config.validate_cluster import check_cluster, training_ranks
from vime.config.validate_correction import check_correction
from vime.config.validate_critic import check_critic
from vime.config.validate_data import check_eval_sets, check_prompts
from vime.config.validate_debug import check_debug
from vime.config.validate_deterministic import check_deterministic
from vime.config.validate_eval import check_evaluation
from vime.config.validate_files import check_hooks, check_paths
from vime.config.validate_loop import check_loop
from vime.config.validate_model import check_lengths, check_model
from vime.config.validate_optimizer import check_optimizer
from vime.config.validate_overlap import check_overlap
from vime.config.validate_recompute import check_recompute, stage_layers
from vime.config.validate_reward import check_reward
from vime.config.validate_routing import check_rollout_routing_replay, check_routing_replay
from vime.config.validate_sharing import check_sharing
from vime.config.validate_stop import check_stop_rule
from vime.config.validate_stream import check_stream
from vime.config.validate_teacher import check_old_actor, check_teacher, teacher_is_served


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks need to know of the world around the settings."""

    platform: str
    """Name of the platform, as in --platform."""
    transports: tuple[str, ...]
    """Weight transports it can do, best first."""
    turns_problem: str | None = None
    """Why nothing can leave a device of it so that trainer and engines take turns; None where that can be."""
    devices: int | None = None
    """Devices of this node; None where they do not limit the run (processes on a CPU, a Ray cluster to join)."""
    reward_names: tuple[str, ...] = ()
    """What --rm-type may say."""
    rewards_without_label: tuple[str, ...] = ()
    """Those of them that need no label."""
    explicit: frozenset[str] = frozenset()
    """Settings the user gave, as "section.field"."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's architecture in Megatron's names; empty when there is no checkpoint to read."""
    max_position_embeddings: int | None = None
    """Positions the checkpoint was made for."""
    head_sizes: tuple[int, ...] | None = None
    """Numbers in an attention head that engines can work with; None where that is no question."""
    shape_claims: tuple[tuple[str, str, Any], ...] = ()
    """Megatron flags that describe the model: (flag name, name in `shape`, value)."""
    megatron_limits: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Megatron fields that the trainer runs at one value only: that value, and why."""
    reads_prompt_files: bool = True
    """Whether files of prompts are here to be looked at."""
    overlapped: bool = False
    """Whether rollouts are generated while the trainer trains."""
    routed_experts_problem: str | None = None
    """Why engines on this platform cannot say which experts they routed tokens to."""
    metric_problem: Callable[[str], str | None] = lambda name: None
    """What is wrong with the name of a metric; None for one that is defined."""


def validate(config: Config, facts: Facts) -> list[str]:
    """Everything wrong with `config`, one sentence each; empty when a run may start."""
    of_training = (
        _batch_sizes(config),
        check_algorithm(config),
        check_correction(config),
        check_critic(config, facts.shape, on_cpu=facts.platform == "cpu"),
        check_teacher(config),
        check_old_actor(config, overlapped=facts.overlapped),
        parallel_sizes(config.megatron).problems(training_ranks(config), facts.shape, on_cpu=facts.platform == "cpu"),
        check_recompute(config, facts.shape, stage_layers(config, facts.shape)),
        check_routing_replay(config, facts.shape),
        check_lengths(config, facts.max_position_embeddings),
        check_prompts(config, reads_files=facts.reads_prompt_files),
    )
    checks = (
        _required(config),
        check_ranges(config),
        _sampling(config),
        *(() if evaluates_without_trainer(config) else of_training),
        check_reward(config, facts.reward_names, facts.rewards_without_label),
        check_optimizer(config),
        check_overlap(config.megatron),
        check_stop_rule(config, facts.metric_problem),
        check_loop(config, overlapped=facts.overlapped),
        check_stream(config, overlapped=facts.overlapped),
        check_deterministic(config, overlapped=facts.overlapped),
        check_cluster(config, platform=facts.platform, transports=facts.transports, devices=facts.devices),
        check_sharing(config, platform=facts.platform, turns_problem=facts.turns_problem),
        refuse_what_the_trainer_cannot_do(config.megatron, facts.megatron_limits),
        check_model(config, facts.shape, facts.shape_claims, facts.head_sizes),
        check_rollout_routing_replay(config, facts.shape, facts.routed_experts_problem),
        check_aligned(config, facts.platform),
        check_paths(config),
        check_debug(config, facts.platform),
        check_evaluation(config),
        check_checkpoints(config, facts.metric_problem),
        check_eval_sets(
            config,
            reward_names=facts.reward_names,
            without_label=facts.rewards_without_label,
            max_positions=facts.max_position_embeddings,
            vocab_size=facts.shape.get("vocab_size", math.inf),
            reads_files=facts.reads_prompt_files,
        ),
        check_hooks(config),
        unread_settings(config, facts.explicit),
        unread_megatron_settings(config, facts.shape),
    )
    return [problem for check in checks for problem in check]


def _narrow_sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    p, k, least = rollout.rollout_top_p, rollout.rollout_top_k, rollout.rollout_min_p
    if not 0 < p <= 1:
        yield f"--rollout-top-p is {p}, but must be above 0 and at most 1"
    if k < -1 or k == 0:
        yield f"--rollout-top-k is {k}, but must be -1 (off) or at least 1"
    if not 0 <= least < 1:
        yield f"--rollout-min-p is {least}, but must be from 0 (off) to below 1"
    if k == 1 and engines_return_support(config) and trains(config):
        yield (
            "--rollout-top-k is 1: each token is the only one that could be sampled, so its probability is 1 whatever "
            "the weights are, and nothing would be learnt; use 2 or more"
        )
    in_range = 0 < p <= 1 and 0 <= least < 1
    if (
        in_range and engines_return_support(config) and k == -1 and not teacher_is_served(config)
    ):  # that one refuses it at all
        flag = f"--rollout-top-p is {p}" if p < 1 else f"--rollout-min-p is {least}"
        yield (
            f"{flag}: the trainer computes over the tokens that it leaves, engines name them in every answer, and "
            "without --rollout-top-k they could be the whole vocabulary; add --rollout-top-k, such as 50 "
            "(--eval-top-p is free)"
        )


def refuse_what_the_trainer_cannot_do(
    megatron: Mapping[str, Any], limits: Mapping[str, tuple[Any, str]]
) -> Iterator[str]:
    """Megatron settings at another value than the one this version's trainer runs.

    Args:
        megatron: what the user gave, by field name.
        limits: field name -> (the one value that works, why), as the trainer states them.
    """
    for name, (value, reason) in limits.items():
        given = megatron.get(name, value)
        if given != value:
            flag = f"--{name.replace('_', '-')} is {given}"
            if value is None:
                yield f"{flag}, which this version cannot do: {reason}; leave it out"
            else:
                yield f"{flag}, but this version can only do {value}: {reason}"


def _required(config: Config) -> Iterator[str]:
    if not config.checkpoint.hf_checkpoint:
        yield "--hf-checkpoint is required: an HF checkpoint folder or a hub name"
    if evaluates_without_trainer(config):
        return
    if not config.data.prompt_data and reads_prompts(config):
        yield "--prompt-data is required: JSONL or Parquet files of prompts (or --data-source-path)"
    if config.rollout.rollout_batch_size == 0:
        yield "--rollout-batch-size is required: prompts per rollout"
    if config.rollout.num_rollout is None and config.rollout.num_epoch is None:
        yield "--num-rollout is required (rollouts to run), or --num-epoch (epochs over the prompts)"
    start, end = config.rollout.start_rollout_id, config.rollout.num_rollout
    if start is not None and end and start >= end:
        yield f"--start-rollout-id is {start}, but the run ends before rollout {end} (--num-rollout)"
    if config.megatron.get("lr") is None and trains(config):
        yield "--lr is required: the learning rate, such as 1e-6"


def _sampling(config: Config) -> Iterator[str]:
    rollout, eval_ = config.rollout, config.eval
    if not isinstance(kwargs := config.data.apply_chat_template_kwargs, dict):
        yield f"--apply-chat-template-kwargs is {kwargs!r}, but needs a JSON object"
    yield from _narrow_sampling(config)
    if eval_.eval_top_p is not None and not 0 < eval_.eval_top_p <= 1:
        yield f"--eval-top-p is {eval_.eval_top_p}, but must be above 0 and at most 1"
    if eval_.eval_top_k is not None and (eval_.eval_top_k < -1 or eval_.eval_top_k == 0):
        yield f"--eval-top-k is {eval_.eval_top_k}, but must be -1 (off) or at least 1"
    over, batch = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    if over is not None and over < batch:
        yield f"--over-sampling-batch-size is {over}, less than --rollout-batch-size {batch}; use at least {batch}"


def _batch_sizes(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if samples <= 0:
        return  # reported as missing
    made = f"{rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples = {samples} per rollout"
    steps, batch = train.num_steps_per_rollout, train.global_batch_size
    if steps is not None and steps > 0 and samples % steps:
        yield f"--num-steps-per-rollout is {steps}, which does not divide {made}; try {_divisors(samples, steps)}"
        return
    if batch is not None and batch > 0:
        if samples % batch:
            yield f"--global-batch-size is {batch}, which does not divide {made}; try {_divisors(samples, batch)}"
            return
        if steps is not None and steps > 0 and batch * steps != samples:
            yield (
                f"--global-batch-size {batch} x --num-steps-per-rollout {steps} = {batch * steps}, but a rollout has "
                f"{made}; give only one of the two"
            )
            return
    step_size = batch if batch else samples // (steps or 1)
    yield from _step_problems(step_size, train, parallel_sizes(config.megatron), training_ranks(config), "")
    if (own := critic_ranks(config)) is not None:
        sizes = parallel_sizes(critic_layout(config.megatron, config.critic))
        yield from _step_problems(step_size, train, sizes, own.total, "of the critic's own ")


def _step_problems(
    step_size: int, train: TrainConfig, sizes: ParallelSizes, world_size: int, whose: str
) -> Iterator[str]:
    """Whether an optimizer step's samples can be shared out over data-parallel ranks."""
    if world_size < 1 or sizes.model < 1 or world_size % sizes.model:
        return  # said elsewhere
    ranks = world_size // sizes.model
    if not train.use_dynamic_batch_size and train.micro_batch_size > 0:
        unit = ranks * train.micro_batch_size
        if step_size % unit:
            yield (
                f"an optimizer step has {step_size} samples, but {ranks} {whose}data-parallel ranks x "
                f"--micro-batch-size {train.micro_batch_size} = {unit} do not divide it; use a multiple of {unit} per "
                "step, or --use-dynamic-batch-size"
            )
    elif step_size < ranks:
        yield f"an optimizer step has {step_size} samples for {ranks} {whose}data-parallel ranks; use {ranks} or more"


def _divisors(total: int, near: int) -> str:
    """The divisors of `total` closest to `near`, at most three; of a huge total only small ones are looked at."""
    small = [d for d in range(1, min(math.isqrt(total), 100_000) + 1) if total % d == 0]
    found = {*small, *(total // d for d in small)}
    return ", ".join(str(d) for d in sorted(sorted(found, key=lambda d: (abs(d - near), d))[:3]))
