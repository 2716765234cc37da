"""Cross-checks of the algorithm: estimator, loss, aggregation, KL, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config, RolloutConfig
from vime.config.estimators import ESTIMATORS, TOKEN_MEAN, pg_loss_type
from vime.config.modes import SFT_ROLLOUT, reads_prompts, replays

_OF_EQUAL_REWARDS = "vime.rollout.filters.check_reward_nonzero_std"


def _supervised(config: Config) -> Iterator[str]:
    if (n := config.rollout.n_samples_per_prompt) != 1:
        yield f"--n-samples-per-prompt is {n}, but supervised data has one answer to a prompt; use 1"
    if config.data.label_key is None and not config.data.apply_chat_template and reads_prompts(config):
        yield (
            "--label-key is required with supervised data: the key of the answer; or --apply-chat-template, if "
            f"--input-key {config.data.input_key} holds whole conversations"
        )


def check_algorithm(config: Config) -> Iterator[str]:
    """What is wrong with the choice of algorithm, one sentence each."""
    algo = config.algo
    if algo.loss_type == "sft_loss":
        if config.rollout.rollout_function_path == RolloutConfig().rollout_function_path:
            yield (
                "--loss-type sft_loss takes answers from the data, but the default rollout function samples; set "
                f"--rollout-function-path {SFT_ROLLOUT}"
            )
        if config.rollout.rollout_function_path == SFT_ROLLOUT and not replays(config):
            yield from _supervised(config)
        return
    if config.rollout.rollout_function_path == SFT_ROLLOUT:
        yield (
            f"--rollout-function-path {SFT_ROLLOUT} takes answers from the data and samples nothing, which is for "
            "--loss-type sft_loss"
        )
    yield from _loss(config)
    yield from _kl(config)
    yield from _rewards(config)


def _loss(config: Config) -> Iterator[str]:
    """What a name stands for, and the bounds."""
    algo, name = config.algo, config.algo.advantage_estimator
    implied = ESTIMATORS[name]
    if implied.pg_loss_type and algo.pg_loss_type not in (None, implied.pg_loss_type):
        yield (
            f"--pg-loss-type is {algo.pg_loss_type}, but --advantage-estimator {name} is GRPO's advantage with the "
            f"{implied.pg_loss_type} loss; drop --pg-loss-type, or use --advantage-estimator grpo"
        )
    mode = TOKEN_MEAN if algo.calculate_per_token_loss else algo.loss_agg_mode
    if algo.calculate_per_token_loss and algo.loss_agg_mode not in (None, TOKEN_MEAN):
        yield f"--calculate-per-token-loss is --loss-agg-mode {TOKEN_MEAN}, but that is {algo.loss_agg_mode}; give one"
    if implied.loss_agg_mode and mode not in (None, implied.loss_agg_mode):
        yield (
            f"--loss-agg-mode is {mode}, but --advantage-estimator {name} divides by a constant length "
            f"({implied.loss_agg_mode}); drop it, or use --advantage-estimator grpo --disable-grpo-std-normalization"
        )
    loss = pg_loss_type(algo)
    if loss in ("ppo", "gspo") and algo.eps_clip >= 1:
        yield f"--eps-clip is {algo.eps_clip}, an offset from 1 that must be below 1: the lower bound is 1 - eps_clip"
    if loss == "cispo" and algo.eps_clip > 1:
        yield f"--eps-clip is {algo.eps_clip}, an offset from 1; with cispo 1 is no lower bound, and more means nothing"
    if algo.eps_clip_c is not None and algo.eps_clip_c <= 1:
        yield f"--eps-clip-c is {algo.eps_clip_c}, but the dual clip needs a bound above 1"


def _kl(config: Config) -> Iterator[str]:
    algo = config.algo
    if algo.use_kl_loss and algo.kl_loss_coef == 0:
        yield "--use-kl-loss with --kl-loss-coef 0 runs a reference model for nothing; set a coefficient, or drop it"
    if not algo.use_kl_loss and algo.kl_loss_coef != 0:
        yield f"--kl-loss-coef is {algo.kl_loss_coef}, but the KL is not in the loss; add --use-kl-loss"
    if algo.use_kl_loss and algo.kl_coef != 0:
        yield (
            f"--kl-coef {algo.kl_coef} takes the KL from the rewards and --use-kl-loss adds it to the loss; it would "
            "count twice, so choose one"
        )
    if algo.use_unbiased_kl and algo.kl_loss_type == "k2":
        yield "--use-unbiased-kl with --kl-loss-type k2: no ratio makes k2 an unbiased estimate; use k1 or k3"


def _rewards(config: Config) -> Iterator[str]:
    """What becomes of rewards on their way to advantages."""
    algo, name = config.algo, config.algo.advantage_estimator
    implied = ESTIMATORS[name]
    if algo.disable_rewards_normalization and not implied.may_stay_raw:
        yield (
            f"--disable-rewards-normalization leaves nothing of --advantage-estimator {name}; for raw rewards use "
            "--advantage-estimator grpo with it"
        )
    if (buffer := algo.overlong_buffer_len) is not None and buffer > config.rollout.rollout_max_response_len:
        yield (
            f"--overlong-buffer-len is {buffer}, more than the {config.rollout.rollout_max_response_len} tokens a "
            "response may have (--rollout-max-response-len)"
        )
    if buffer is not None and config.rollout.custom_convert_samples_to_train_data_path is not None:
        yield (
            "--overlong-buffer-len goes by the length of samples, but --custom-convert-samples-to-train-data-path "
            "makes rows of its own; take the penalty from rewards there"
        )
    if config.rollout.n_samples_per_prompt == 1 and config.rollout.dynamic_sampling_filter_path == _OF_EQUAL_REWARDS:
        yield (
            f"--dynamic-sampling-filter-path {_OF_EQUAL_REWARDS} drops groups of equal rewards, and with "
            "--n-samples-per-prompt 1 every group is one; drop the filter, or use 2 or more"
        )
    if (
        config.rollout.n_samples_per_prompt == 1
        and implied.compares_groups
        and not algo.disable_rewards_normalization
        and config.reward.custom_reward_post_process_path is None
        and algo.custom_advantage_function_path is None
        and not algo.use_opd  # the teacher says of each token alone what it is worth
    ):
        yield (
            "--n-samples-per-prompt is 1, and a group of one has advantage 0, so nothing would be learnt; use 2 or "
            "more, --advantage-estimator reinforce_plus_plus, or --disable-rewards-normalization"
        )
