"""The settings of the algorithm, a section like those of sections.py."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.estimators import ESTIMATORS, LOSS_AGG_MODES, PG_LOSS_TYPES
from vime.config.schema import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """The algorithm. docs/algorithms gives each default's reason."""

    loss_type: str = setting("policy_loss", "what is minimised", choices=("policy_loss", "sft_loss", "custom_loss"))
    advantage_estimator: str = setting(
        "grpo", "how rewards become advantages; some names stand for a loss, too", choices=tuple(ESTIMATORS)
    )
    pg_loss_type: str | None = setting(
        None, "the policy loss: gspo clips by sequence; default: the estimator's, else ppo", choices=PG_LOSS_TYPES
    )
    loss_agg_mode: str | None = setting(
        None, "how token losses become one; default: the estimator's, else trajectory-mean", choices=LOSS_AGG_MODES
    )
    loss_agg_length: int | None = setting(
        None, "constant length of seq-mean-token-sum-norm; default: --rollout-max-response-len"
    )
    calculate_per_token_loss: bool = setting(False, "another name for --loss-agg-mode token-mean")
    disable_grpo_std_normalization: bool = setting(False, "centre rewards but do not divide by the group's std")
    disable_rewards_normalization: bool = setting(False, "use raw rewards as advantages")
    normalize_advantages: bool = setting(
        False, "whiten advantages over all trainable tokens of a rollout; the reinforce_plus_plus pair always does"
    )
    gamma: float = setting(1.0, "discount of the return for each token of the policy's")
    overlong_buffer_len: int | None = setting(
        None, "take a growing penalty from rewards over the last tokens before --rollout-max-response-len; default: off"
    )
    overlong_penalty_factor: float = setting(1.0, "that penalty at the full length")
    custom_loss_function_path: str | None = setting(
        None, "dotted path of a function (config, inputs, sum_of_sample_mean) -> (loss, metrics), for custom_loss"
    )
    custom_advantage_function_path: str | None = setting(
        None, "dotted path of a function (config, batch) -> an advantage for each sample, or for each token"
    )
    custom_pg_loss_reducer_function_path: str | None = setting(
        None, "dotted path of a function that weights each token's policy loss (docs/customization.md)"
    )
    eps_clip: float = setting(0.2, "lower clip bound of the ratio, as an offset from 1")
    eps_clip_high: float | None = setting(None, "upper clip bound, as an offset from 1; default: --eps-clip")
    eps_clip_c: float | None = setting(None, "dual-clip bound for negative advantages, above 1; default: off")
    kl_coef: float = setting(0.0, "take this times the KL to the reference model from the rewards")
    use_kl_loss: bool = setting(False, "add the KL to the reference model to the loss")
    ref_update_interval: int | None = setting(
        None, "the reference becomes the policy every this many rollouts; default: it stays"
    )
    kl_loss_coef: float = setting(0.0, "its coefficient")
    kl_loss_type: str | None = setting(
        None, "the KL's estimator; default: k3 in the loss, k1 in the rewards", choices=("k1", "k2", "k3", "low_var_kl")
    )
    use_unbiased_kl: bool = setting(False, "multiply the KL in the loss with the ratio to the policy that sampled")
    use_opsm: bool = setting(
        False, "learn nothing from sequences of negative advantage that the policy has moved away from"
    )
    opsm_delta: float = setting(1e-4, "mean log-ratio to the engine's log-probs, in nats a token, that is too far")
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus")
