"""Settings that were given but that nobody would read, as the run is configured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import TypeAlias

from vime.config import Config, CriticConfig, FaultConfig, TeacherConfig
from vime.config.estimators import (
    CONSTANT_LENGTH,
    ESTIMATORS,
    loss_agg_mode,
    needs_critic,
    needs_reference,
    pg_loss_type,
)
from vime.config.eval_sets import has_eval_sets
from vime.config.modes import (
    SFT_ROLLOUT,
    evaluates_only,
    generates,
    learns_answers,
    reads_prompts,
    replays,
    trains,
)
from vime.config.validate_correction import NOT_SUPERVISED
from vime.config.validate_correction import RULES as CORRECTION_RULES
from vime.config.validate_stream import RULES as STREAM_RULES

Rule: TypeAlias = tuple[tuple[str, ...], Callable[[Config], bool], str]


def _is_sft(c: Config) -> bool:
    return c.algo.loss_type == "sft_loss" and not evaluates_only(c)


_TEACHER = tuple(f"teacher.{field.name}" for field in fields(TeacherConfig))
_SERVER = tuple(
    f"teacher.opd_teacher_{name}" for name in ("model", "key_file", "timeout_s", "max_retries", "max_connections")
)
_CRITIC = tuple(f"critic.{field.name}" for field in fields(CriticConfig))
_FAULT = tuple(f"fault.{field.name}" for field in fields(FaultConfig))
# (settings, when nobody reads them, what to do about it)
_RULES: tuple[Rule, ...] = (
    (("rollout.num_epoch",), lambda c: bool(c.rollout.num_rollout), "--num-rollout counts; give one of them"),
    (
        ("algo.kl_loss_type", "algo.ref_update_interval", "checkpoint.ref_load"),
        lambda c: not needs_reference(c.algo),
        "add --use-kl-loss, or --kl-coef",
    ),
    (_CRITIC, lambda c: not needs_critic(c.algo), "add --advantage-estimator ppo, which has a critic"),
    (
        ("algo.disable_rewards_normalization",),
        lambda c: needs_critic(c.algo),
        "ppo takes rewards as they are; its critic is what they are compared with",
    ),
    (
        ("algo.custom_advantage_function_path",),
        lambda c: needs_critic(c.algo),
        "ppo makes advantages of its critic's values; choose another --advantage-estimator, or drop the function",
    ),
    ((*_TEACHER, "algo.opd_kl_coef"), lambda c: not c.algo.use_opd, "add --use-opd"),
    (
        _SERVER,
        lambda c: c.algo.use_opd and c.teacher.opd_teacher_url is None,
        "add --opd-teacher-url, the server to ask",
    ),
    (("algo.use_unbiased_kl",), lambda c: not c.algo.use_kl_loss, "add --use-kl-loss"),
    (("algo.opsm_delta",), lambda c: not c.algo.use_opsm, "add --use-opsm"),
    (("algo.overlong_penalty_factor",), lambda c: c.algo.overlong_buffer_len is None, "add --overlong-buffer-len"),
    (
        ("algo.loss_agg_length",),
        lambda c: loss_agg_mode(c.algo) != CONSTANT_LENGTH,
        f"add --loss-agg-mode {CONSTANT_LENGTH}",
    ),
    (
        ("algo.gamma",),
        lambda c: not ESTIMATORS[c.algo.advantage_estimator].discounts,
        "the estimator gives every token of a sample the same advantage; reinforce_plus_plus discounts",
    ),
    (
        ("algo.normalize_advantages",),
        lambda c: not c.algo.normalize_advantages and ESTIMATORS[c.algo.advantage_estimator].whitens,
        "whitening is part of the estimator",
    ),
    (
        ("algo.disable_grpo_std_normalization",),
        lambda c: not ESTIMATORS[c.algo.advantage_estimator].divides_by_std,
        "the estimator does not divide by a group's std",
    ),
    (
        ("algo.eps_clip", "algo.eps_clip_high", "algo.eps_clip_c"),
        lambda c: pg_loss_type(c.algo) == "reinforce" and c.algo.loss_type == "policy_loss",
        "--pg-loss-type reinforce clips nothing",
    ),
    (("algo.eps_clip_c",), lambda c: pg_loss_type(c.algo) == "cispo", "cispo clips weights, not the update"),
    (
        ("train.stop_below", "train.stop_above", "train.stop_window"),
        lambda c: c.train.stop_metric is None,
        "add --stop-metric, such as train/loss",
    ),
    (
        ("train.stop_metric",),
        lambda c: c.train.stop_below is None and c.train.stop_above is None,
        "add --stop-below or --stop-above",
    ),
    (
        ("data.prompt_data", "data.prompt_data_weights", "data.rollout_shuffle", "data.rollout_max_prompt_len"),
        lambda c: c.data.disable_rollout_global_dataset,
        "--disable-rollout-global-dataset reads no prompts",
    ),
    (
        ("data.sft_turns",),
        lambda c: not learns_answers(c) or replays(c) or not c.data.apply_chat_template,
        f"it is for conversations: --rollout-function-path {SFT_ROLLOUT} with --apply-chat-template",
    ),
    (
        ("data.sft_overlong",),
        lambda c: not learns_answers(c) or not reads_prompts(c),
        f"it is for --prompt-data with --rollout-function-path {SFT_ROLLOUT}",
    ),
    (("train.lr_warmup_init",), lambda c: c.train.lr_warmup_iters == 0, "add --lr-warmup-iters"),
    (
        ("train.lr_decay_iters",),
        lambda c: c.train.lr_decay_style == "constant",
        "--lr-decay-style constant does not decay; choose another style",
    ),
    (
        ("train.max_tokens_per_gpu", "train.log_probs_max_tokens_per_gpu"),
        lambda c: not c.train.use_dynamic_batch_size,
        "add --use-dynamic-batch-size",
    ),
    (
        ("train.micro_batch_size",),
        lambda c: c.train.use_dynamic_batch_size,
        "--use-dynamic-batch-size fills micro-batches by --max-tokens-per-gpu; drop one of the two",
    ),
    (
        (
            "checkpoint.save_interval",
            "checkpoint.no_save_optim",
            "checkpoint.async_save",
            "checkpoint.no_save_checksums",
            "checkpoint.keep_last_checkpoints",
        ),
        lambda c: c.checkpoint.save is None,
        "add --save, the folder to write to",
    ),
    (
        ("checkpoint.no_load_optim", "checkpoint.ckpt_step", "checkpoint.finetune"),
        lambda c: c.checkpoint.load is None,
        "add --load, the folder to resume from",
    ),
    (
        ("checkpoint.no_load_optim",),
        lambda c: c.checkpoint.finetune,
        "--finetune already takes the weights alone",
    ),
    (
        ("checkpoint.keep_best_checkpoint",),
        lambda c: c.checkpoint.keep_last_checkpoints is None,
        "all checkpoints stay; add --keep-last-checkpoints",
    ),
    (("checkpoint.save_hf_interval",), lambda c: c.checkpoint.save_hf is None, "add --save-hf, the folder to write to"),
    (
        ("data.apply_chat_template_kwargs", "data.tool_key"),
        lambda c: not c.data.apply_chat_template,
        "add --apply-chat-template",
    ),
    (
        ("debug.load_debug_rollout_data_subsample",),
        lambda c: c.debug.load_debug_rollout_data is None,
        "add --load-debug-rollout-data",
    ),
    (
        ("debug.save_debug_train_data", "debug.profile", "debug.record_memory_history"),
        lambda c: c.debug.debug_rollout_only,
        "--debug-rollout-only starts no trainer",
    ),
    (
        ("debug.use_pytorch_profiler", "debug.profile_step_start", "debug.profile_step_end"),
        lambda c: not c.debug.profile,
        "add --profile",
    ),
    (
        ("debug.profile_ranks",),
        lambda c: not (c.debug.profile or c.debug.record_memory_history),
        "add --profile or --record-memory-history",
    ),
    (
        ("debug.memory_snapshot_dir", "debug.memory_snapshot_num_steps"),
        lambda c: not c.debug.record_memory_history,
        "add --record-memory-history",
    ),
    (
        ("reward.rm_url_timeout_s", "reward.rm_url_max_retries", "reward.rm_url_max_connections"),
        lambda c: c.reward.rm_url is None,
        "add --rm-url, the server to ask",
    ),
    (("reward.group_rm",), lambda c: c.reward.custom_rm_path is None, "add --custom-rm-path, the function for groups"),
    (
        (
            "eval.eval_interval",
            "eval.skip_eval_before_train",
            "eval.eval_input_key",
            "eval.eval_label_key",
            "eval.eval_tool_key",
            "eval.n_samples_per_eval_prompt",
            "eval.eval_temperature",
            "eval.eval_top_p",
            "eval.eval_top_k",
            "eval.eval_min_new_tokens",
            "eval.eval_max_response_len",
            "eval.eval_max_prompt_len",
            "eval.eval_max_context_len",
            "eval.eval_reward_key",
            "rollout.eval_function_path",
            "rollout.custom_eval_rollout_log_function_path",
        ),
        lambda c: not has_eval_sets(c),
        "add --eval-prompt-data, pairs of NAME PATH, or --eval-config",
    ),
    (
        ("sync.update_weight_disk_dir",),
        lambda c: c.sync.update_weight_transport != "disk",
        "add --update-weight-transport disk",
    ),
    (
        (
            "log.wandb_mode",
            "log.wandb_dir",
            "log.wandb_project",
            "log.wandb_group",
            "log.wandb_team",
            "log.wandb_run_id",
            "log.wandb_host",
        ),
        lambda c: not c.log.use_wandb,
        "add --use-wandb",
    ),
    (("log.trace_max_mib",), lambda c: not c.log.trace, "add --trace"),
    (_FAULT, lambda c: not generates(c), "the run has no engines"),
    (_FAULT[1:], lambda c: not c.fault.use_fault_tolerance, "drop --no-use-fault-tolerance"),
    (
        ("cluster.rollout_num_gpus", "cluster.rollout_num_gpus_per_engine", "log.engine_start_timeout_s"),
        lambda c: bool(c.cluster.rollout_external_engine_addrs),
        "--rollout-external-engine-addrs brings engines that run already",
    ),
    (
        ("cluster.rollout_external_engine_key_file",),
        lambda c: not c.cluster.rollout_external_engine_addrs,
        "add --rollout-external-engine-addrs",
    ),
    (
        ("sync.update_weights_interval",),
        lambda c: evaluates_only(c) or not (trains(c) and generates(c)),
        "no weights go from a trainer to engines, rollout by rollout",
    ),
    (("train.use_rollout_routing_replay",), evaluates_only, "--num-rollout 0 trains nothing"),
    (("sync.weight_probe_tolerance",), lambda c: c.sync.weight_probe_interval == 0, "set --weight-probe-interval"),
    (
        ("cluster.num_cpus",),
        lambda c: c.cluster.ray_address is not None,
        "--ray-address joins a cluster that has its own",
    ),
    (
        (
            "algo.advantage_estimator",
            "algo.pg_loss_type",
            "algo.loss_agg_mode",
            "algo.loss_agg_length",
            "algo.calculate_per_token_loss",
            "algo.normalize_advantages",
            "algo.overlong_buffer_len",
            "algo.kl_coef",
            "algo.use_opsm",
            *NOT_SUPERVISED,
            "algo.use_opd",
            "algo.keep_old_actor",
            "algo.disable_grpo_std_normalization",
            "algo.disable_rewards_normalization",
            "algo.eps_clip",
            "algo.eps_clip_high",
            "algo.eps_clip_c",
            "algo.use_kl_loss",
            "algo.kl_loss_coef",
            "algo.ref_update_interval",
            "algo.entropy_coef",
            "rollout.dynamic_sampling_filter_path",
            "rollout.custom_generate_function_path",
            "rollout.partial_rollout",
            "rollout.rollout_sample_hook_path",
            "reward.custom_reward_post_process_path",
            "algo.custom_pg_loss_reducer_function_path",
            "algo.custom_advantage_function_path",
            "algo.custom_loss_function_path",
            "rollout.rollout_data_postprocess_path",
            "rollout.rollout_sample_filter_path",
            "rollout.rollout_all_samples_process_path",
            "rollout.over_sampling_batch_size",
            "rollout.rollout_stop",
            "rollout.rollout_stop_token_ids",
            "rollout.rollout_temperature",
            "reward.rm_type",
            "reward.rm_parts",
            "reward.custom_rm_path",
            "eval.eval_prompt_data",
            "eval.eval_config",
        ),
        _is_sft,
        "--loss-type sft_loss has no policy loss and samples nothing",
    ),
    (
        (
            "algo.eps_clip",
            "algo.eps_clip_high",
            "algo.eps_clip_c",
            "algo.pg_loss_type",
            "algo.use_opsm",
            "algo.custom_pg_loss_reducer_function_path",
        ),
        lambda c: c.algo.loss_type == "custom_loss",
        "--loss-type custom_loss has a loss of its own",
    ),
    (
        ("algo.custom_loss_function_path",),
        lambda c: c.algo.loss_type == "policy_loss",
        "add --loss-type custom_loss",
    ),
    (
        ("sync.custom_update_weight_post_write_path",),
        lambda c: c.sync.update_weight_transport != "disk",
        "add --update-weight-transport disk",
    ),
    (
        (
            "algo.disable_grpo_std_normalization",
            "algo.disable_rewards_normalization",
            "algo.normalize_advantages",
            "algo.kl_coef",
            "algo.overlong_buffer_len",
            "reward.custom_reward_post_process_path",
        ),
        lambda c: c.algo.custom_advantage_function_path is not None,
        "--custom-advantage-function-path makes the advantages",
    ),
    (
        (
            "algo.disable_grpo_std_normalization",
            "algo.disable_rewards_normalization",
            "algo.normalize_advantages",
            "algo.kl_coef",
            "algo.overlong_buffer_len",
        ),
        lambda c: c.reward.custom_reward_post_process_path is not None and not needs_critic(c.algo),
        "--custom-reward-post-process-path makes the advantages",
    ),
    (
        ("algo.overlong_buffer_len",),
        lambda c: c.reward.custom_reward_post_process_path is not None and needs_critic(c.algo),
        "--custom-reward-post-process-path makes the rewards",
    ),
    (
        ("algo.disable_grpo_std_normalization",),
        lambda c: c.algo.disable_rewards_normalization,
        "--disable-rewards-normalization already leaves rewards as they are",
    ),
    *CORRECTION_RULES,
    *STREAM_RULES,
)


def unread_settings(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """One sentence for each given setting that has no effect.

    Args: explicit: the settings the user gave, as "section.field".
    """
    for keys, is_unread, remedy in _RULES:
        for key in keys:
            if key in explicit and is_unread(config):
                section, name = key.split(".")
                value = getattr(getattr(config, section), name)
                yield f"--{name.replace('_', '-')} is {value!r}, but nothing reads it: {remedy}"
