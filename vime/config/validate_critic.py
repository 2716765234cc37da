"""Checks of PPO's critic: what its settings need, and what the run would never come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.critic_ranks import critic_layout, critic_ranks
from vime.config.estimators import needs_critic
from vime.config.modes import trains
from vime.config.parallel import parallel_sizes

_OWN_SIZES = (
    "critic_tensor_model_parallel_size",
    "critic_pipeline_model_parallel_size",
    "critic_context_parallel_size",
)


def check_critic(config: Config, shape: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
    """One sentence for each problem; that nobody reads a critic's settings without one is said elsewhere.

    Args:
        shape: the model's TransformerConfig fields; empty when they are not known.
        on_cpu: the ranks talk through gloo.
    """
    critic, train = config.critic, config.train
    if not needs_critic(config.algo):
        return
    yield from _own_devices(config, shape, on_cpu=on_cpu)
    if critic.critic_load is not None and not (Path(critic.critic_load) / "config.json").is_file():
        yield f"--critic-load {critic.critic_load} holds no config.json; it must be an HF checkpoint folder"
    warmup, decay = critic.critic_lr_warmup_iters, train.lr_decay_iters
    if decay is not None and 0 < decay <= warmup:
        yield f"--critic-lr-warmup-iters is {warmup}, not below --lr-decay-iters {decay}"
    alone, rollouts = critic.num_critic_only_steps, config.rollout.num_rollout
    if rollouts and alone >= rollouts:
        yield f"--num-critic-only-steps is {alone}, so that none of the {rollouts} rollouts would train the policy"
    best = config.checkpoint.keep_best_checkpoint
    best = None if best is None else best.removesuffix(":max").removesuffix(":min")
    for flag, metric in (("--stop-metric", train.stop_metric), ("--keep-best-checkpoint", best)):
        if alone and metric is not None and _is_of_updates(metric):
            yield (
                f"{flag} is {metric}, which the first {alone} rollouts do not have: they train the critic alone "
                "(--num-critic-only-steps); use a metric of rollout/ or train/critic-"
            )


def _own_devices(config: Config, shape: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
    ranks = critic_ranks(config)
    if ranks is None:
        for name in _OWN_SIZES:
            if getattr(config.critic, name) is not None:
                yield (
                    f"--{name.replace('_', '-')} is of a critic on devices of its own, and this one takes turns with "
                    "the policy in its layout; add --critic-num-gpus-per-node, or leave it out"
                )
        return
    if not trains(config):
        return
    if ranks.nodes > 1 and config.cluster.ray_address is None:
        yield (
            f"--critic-num-nodes is {ranks.nodes}, but the Ray that is started here has one node; start Ray on every "
            "node and give --ray-address (docs/multi_node.md), or use 1"
        )
    sizes = parallel_sizes(critic_layout(config.megatron, config.critic))
    for problem in sizes.problems(ranks.total, shape, on_cpu=on_cpu):
        yield (
            f"the critic's {ranks.total} ranks of its own (--critic-num-nodes x --critic-num-gpus-per-node; "
            f"--critic-tensor-model-parallel-size and its like are its own): {problem}"
        )


def _is_of_updates(metric: str) -> bool:
    """Whether it is of the policy's optimizer steps."""
    of_all = ("train/critic-", "train/train_rollout_logprob", "train/policy_version", "train/step", "train/tokens")
    return metric.startswith("train/") and not metric.startswith((*of_all, "train/global_batch_size"))
