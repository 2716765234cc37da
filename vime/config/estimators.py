"""The advantage estimators by name, and what each implies for the loss; names alone, nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.config.algo_section import AlgoConfig

TRAJECTORY_MEAN = "trajectory-mean"
TOKEN_MEAN = "token-mean"
SEQUENCE_MEAN = "seq-mean-token-mean"
TOKEN_SUM = "seq-mean-token-sum"
CONSTANT_LENGTH = "seq-mean-token-sum-norm"
LOSS_AGG_MODES = (TRAJECTORY_MEAN, TOKEN_MEAN, SEQUENCE_MEAN, TOKEN_SUM, CONSTANT_LENGTH)
PG_LOSS_TYPES = ("ppo", "gspo", "cispo", "reinforce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One value of --advantage-estimator."""

    function: str
    """Dotted path of (vime.algo.advantages.AdvantageInputs) -> advantages, [B] or [T]."""
    pg_loss_type: str | None = None
    """The loss that the name stands for; None: any, the clipped one by default."""
    loss_agg_mode: str | None = None
    """The aggregation that the name stands for; None: any, the trajectory mean by default."""
    compares_groups: bool = True
    """Rewards are compared within their group, so that one alone teaches nothing."""
    divides_by_std: bool = False
    """--disable-grpo-std-normalization has a meaning."""
    may_stay_raw: bool = True
    """--disable-rewards-normalization has a meaning."""
    whitens: bool = False
    """--normalize-advantages belongs to the method."""
    discounts: bool = False
    """--gamma has a meaning."""
    has_critic: bool = False
    """The trainer has a critic, and makes advantages of its values (`vime.trainer.megatron.losses.ppo`); `function`
    gives the rewards that they are made of."""


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": Estimator(function="vime.algo.advantages.grpo", divides_by_std=True),
        "dr_grpo": Estimator(function="vime.algo.advantages.dr_grpo", loss_agg_mode=CONSTANT_LENGTH),
        "rloo": Estimator(function="vime.algo.advantages.rloo", may_stay_raw=False),
        "gspo": Estimator(function="vime.algo.advantages.grpo", divides_by_std=True, pg_loss_type="gspo"),
        "cispo": Estimator(function="vime.algo.advantages.grpo", divides_by_std=True, pg_loss_type="cispo"),
        "reinforce_plus_plus": Estimator(
            function="vime.algo.reinforce_pp.reinforce_plus_plus",
            compares_groups=False,
            may_stay_raw=False,
            whitens=True,
            discounts=True,
        ),
        "reinforce_plus_plus_baseline": Estimator(
            function="vime.algo.reinforce_pp.reinforce_plus_plus_baseline", may_stay_raw=False, whitens=True
        ),
        "ppo": Estimator(
            function="vime.algo.advantages.raw_rewards", compares_groups=False, discounts=True, has_critic=True
        ),
    }
)


def pg_loss_type(algo: AlgoConfig) -> str:
    """The policy loss of a run: what was asked for, else what the estimator stands for."""
    return algo.pg_loss_type or ESTIMATORS[algo.advantage_estimator].pg_loss_type or "ppo"


def loss_agg_mode(algo: AlgoConfig) -> str:
    """How token losses of a run become one number: what was asked for, else what the estimator stands for."""
    if algo.loss_agg_mode is None and algo.calculate_per_token_loss:
        return TOKEN_MEAN
    return algo.loss_agg_mode or ESTIMATORS[algo.advantage_estimator].loss_agg_mode or TRAJECTORY_MEAN


def whitens(algo: AlgoConfig) -> bool:
    """Whether advantages are whitened over the trainable tokens of the rollout."""
    return algo.normalize_advantages or ESTIMATORS[algo.advantage_estimator].whitens


def kl_type(algo: AlgoConfig) -> str:
    """The estimator of the KL to the reference: k1 in the reward, k3 in the loss, unless told."""
    return algo.kl_loss_type or ("k1" if algo.kl_coef else "k3")


def needs_critic(algo: AlgoConfig) -> bool:
    """Whether the run trains a critic beside the policy."""
    return ESTIMATORS[algo.advantage_estimator].has_critic and algo.loss_type != "sft_loss"


def needs_reference(algo: AlgoConfig) -> bool:
    """Whether the run has a reference model."""
    return algo.use_kl_loss or algo.kl_coef != 0
