"""What each row of the table is trained with, beside the quickstart's recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vime.config.estimators import ESTIMATORS

# What an estimator's paper sets otherwise, and what it needs at all.
FLAGS: Mapping[str, Sequence[str]] = {
    "gspo": ("--eps-clip", "3e-3", "--eps-clip-high", "4e-3"),  # of sequences; wider than the paper's: steps are larger
    "cispo": ("--eps-clip", "1", "--eps-clip-high", "4"),
}
# Rows that are no estimator of their own.
VARIANTS: Mapping[str, Sequence[str]] = {
    "grpo without std": ("--advantage-estimator", "grpo", "--disable-grpo-std-normalization"),
    "grpo, DAPO's loss": ("--advantage-estimator", "grpo", "--loss-agg-mode", "token-mean"),
    "rloo, REINFORCE": ("--advantage-estimator", "rloo", "--pg-loss-type", "reinforce", "--num-steps-per-rollout", "1"),
    "grpo, KL in the loss": ("--advantage-estimator", "grpo", "--use-kl-loss", "--kl-loss-coef", "1e-3"),
    "reinforce_plus_plus, KL in the reward": ("--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "1e-3"),
}


def rows(*, with_variants: bool) -> dict[str, list[str]]:
    """Name of each row of the table -> flags."""
    table = {name: ["--advantage-estimator", name, *FLAGS.get(name, ())] for name in ESTIMATORS}
    if with_variants:
        table |= {name: list(flags) for name, flags in VARIANTS.items()}
    return table


def flags_of(row: Sequence[str]) -> list[str]:
    """All flags of a row beside the recipe's: two optimizer steps a rollout, so that a ratio may leave 1."""
    steps = [] if "--num-steps-per-rollout" in row else ["--num-steps-per-rollout", "2"]
    return [*row, *steps]
