"""Checks of PPO's critic: what its settings need, and what the run would never come to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.config import Config
from vime.config.estimators import needs_critic


def check_critic(config: Config) -> Iterator[str]:
    """One sentence for each problem; that nobody reads a critic's settings without one is said elsewhere."""
    critic, train = config.critic, config.train
    if not needs_critic(config.algo):
        return
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


def _is_of_updates(metric: str) -> bool:
    """Whether it is of the policy's optimizer steps."""
    of_all = ("train/critic-", "train/train_rollout_logprob", "train/policy_version", "train/step", "train/tokens")
    return metric.startswith("train/") and not metric.startswith((*of_all, "train/global_batch_size"))
