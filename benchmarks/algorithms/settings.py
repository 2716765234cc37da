"""What each row of the table is trained with, beside the quickstart's recipe, and the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vime.config.estimators import ESTIMATORS

QUICK = ("--num-rollout", "24", "--eval-interval", "24", "--rollout-batch-size", "64", "--lr", "4e-4")
FULL = ("--num-rollout", "72", "--eval-interval", "12", "--rollout-batch-size", "64", "--lr", "4e-4")
MIN_GAIN = {True: 0.05, False: 0.1}
"""By `quick`: what accuracy must gain at least. In a brief run with seed 0 rows gained 0.09 (cispo) to 0.25."""

# What an estimator's paper sets otherwise, and what it needs at all.
FLAGS: Mapping[str, Sequence[str]] = {
    "gspo": ("--eps-clip", "3e-3", "--eps-clip-high", "4e-3"),  # of sequences; wider than the paper's: steps are larger
    "cispo": ("--eps-clip", "1", "--eps-clip-high", "4"),
    "ppo": (
        *("--critic-lr", "5e-4", "--num-critic-only-steps", "4", "--value-clip", "0.5"),
        *("--lambd", "1", "--normalize-advantages"),
    ),
}
# Rows that are no estimator of their own.
VARIANTS: Mapping[str, Sequence[str]] = {
    "grpo without std": ("--advantage-estimator", "grpo", "--disable-grpo-std-normalization"),
    "grpo, DAPO's loss": ("--advantage-estimator", "grpo", "--loss-agg-mode", "token-mean"),
    "rloo, REINFORCE": ("--advantage-estimator", "rloo", "--pg-loss-type", "reinforce", "--num-steps-per-rollout", "1"),
    "grpo, KL in the loss": ("--advantage-estimator", "grpo", "--use-kl-loss", "--kl-loss-coef", "1e-3"),
    "reinforce_plus_plus, KL in the reward": ("--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "1e-3"),
    "grpo, one step ahead": ("--advantage-estimator", "grpo"),
    "grpo, fully asynchronous": ("--advantage-estimator", "grpo", "--fully-async"),
}
AHEAD = ("grpo, one step ahead", "grpo, fully asynchronous")
"""Rows of train_async.py. They must learn as IN_TURNS does."""
IN_TURNS = "grpo"
NOT_READ: Mapping[str, Sequence[str]] = {"rloo, REINFORCE": ("eps-clip", "eps-clip-high")}
"""Settings of the quickstart's recipe that a row must leave out, because nothing would read them."""
LONGEST = ("ppo",)
"""Rows whose steps take much longer than the others'."""
CONTROL = "control: rewards by chance"
"""A row that must not learn: grpo with a reward that does not look at the question."""


def rows(*, with_variants: bool) -> dict[str, list[str]]:
    """Name of each row of the table -> flags."""
    table = {name: ["--advantage-estimator", name, *FLAGS.get(name, ())] for name in ESTIMATORS}
    if with_variants:
        table |= {name: list(flags) for name, flags in VARIANTS.items()}
    return table | {CONTROL: ["--advantage-estimator", "grpo", "--rm-type", "random"]}


def flags_of(name: str) -> list[str]:
    """All flags of a row beside the recipe's: two optimizer steps a rollout, so that a ratio may leave 1."""
    row = rows(with_variants=True)[name]
    return [*row, *([] if "--num-steps-per-rollout" in row else ["--num-steps-per-rollout", "2"])]
