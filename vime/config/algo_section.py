"""The settings of the algorithm, a section like those of sections.py."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.estimators import ESTIMATORS, LOSS_AGG_MODES, PG_LOSS_TYPES
from vime.config.schema import setting

CORRECTION_LEVELS = ("token", "sequence", "geometric")


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
    keep_old_actor: bool = setting(
        False, "old log-probs of rollouts of an earlier version come from its weights, kept in host memory"
    )
    use_opd: bool = setting(False, "on-policy distillation: learn from a teacher's log-probs of the sampled tokens")
    opd_kl_coef: float = setting(1.0, "take this times the KL to the teacher from each token's advantage")
    use_opsm: bool = setting(
        False, "learn nothing from sequences of negative advantage that the policy has moved away from"
    )
    opsm_delta: float = setting(1e-4, "mean log-ratio to the engine's log-probs, in nats a token, that is too far")
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus")
    use_rollout_logprobs: bool = setting(
        False, "the old log-probs of the loss are the engine's, not the trainer's before the first step"
    )
    use_tis: bool = setting(
        False, "weight the policy loss with exp(trainer's log-prob before the first step - engine's), bounded"
    )
    tis_level: str = setting(
        "token", "whose ratio that is; of a sequence the product or the geometric mean", choices=CORRECTION_LEVELS
    )
    tis_mode: str = setting(
        "truncate", "outside the bounds the weight is the bound, or 0 (IcePop, MIS)", choices=("truncate", "mask")
    )
    tis_clip: float = setting(2.0, "upper bound of that ratio")
    tis_clip_low: float = setting(0.0, "lower bound of that ratio")
    custom_tis_function_path: str | None = setting(
        None, "dotted path of a function (config, inputs) -> (weights, metrics), in place of the --tis-* weights"
    )
    use_rs: bool = setting(False, "learn nothing from tokens or sequences whose ratio to the engine is outside bounds")
    rs_level: str = setting("sequence", "whose ratio the bounds are of", choices=CORRECTION_LEVELS)
    rs_lower_bound: float | None = setting(None, "its lower bound; default: none")
    rs_upper_bound: float | None = setting(None, "its upper bound; default: none")
    rs_veto_threshold: float | None = setting(
        None, "reject a whole sequence if one of its tokens has a ratio below this; default: off"
    )
    rejected_tokens: str = setting(
        "counted",
        "rejected tokens stay in the loss's divisors, KL and entropy, or are removed as if under mask 0",
        choices=("counted", "removed"),
    )

    @property
    def corrects(self) -> bool:
        """Whether the policy loss is weighted or masked for the difference of engine and trainer."""
        return self.use_tis or self.use_rs

    @property
    def rejects_tokens(self) -> bool:
        """Whether that gives tokens no weight at all."""
        return self.use_rs or (self.use_tis and self.custom_tis_function_path is None and self.tis_mode == "mask")

    @property
    def removes_tokens(self) -> bool:
        """Whether these are taken out of the batch, which must be known before the first step."""
        return self.rejects_tokens and self.rejected_tokens == "removed"
