"""Every setting of vime's own, one frozen dataclass per concern. Flags and YAML names are generated from these.

Upstream's names are kept. The algorithm's section is in algo_section.py. Settings that belong to Megatron, vLLM or
vllm-router are not listed here: they keep their owners' names and travel in `Config.megatron`, `Config.vllm` and
`Config.router`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vime.config.schema import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Which devices train and which generate."""

    platform: str = setting("auto", "hardware to run on: auto, cpu, cuda, or a name an entry point registers")
    actor_num_nodes: int = setting(1, "nodes that train")
    actor_num_gpus_per_node: int = setting(1, "training ranks per node (devices; on the CPU platform, processes)")
    rollout_num_gpus: int | None = setting(
        None, "engines' devices; default: training's with --colocate, else one engine's"
    )
    rollout_num_gpus_per_engine: int = setting(1, "devices of one engine (its tensor parallel size)")
    colocate: bool = setting(False, "trainer and engines share the devices")
    offload_train: bool | None = setting(
        None, "with --colocate: the trainer leaves the devices while engines generate; default: when both do not fit"
    )
    offload_rollout: bool | None = setting(
        None, "with --colocate: engines sleep while the trainer works; default: when both do not fit"
    )
    offload: bool | None = setting(None, "both --offload-train and --offload-rollout")
    ray_address: str | None = setting(None, "join this Ray cluster ('auto' or host:port); default: start one here")
    rollout_external_engine_addrs: list[str] = setting(
        [], "host:port of each engine that `vime engine` already serves; the run starts none and leaves them running"
    )
    rollout_external_engine_key_file: str | None = setting(
        None, "file (mode 0600) with the key of those engines; required with them"
    )
    num_cpus: int | None = setting(None, "CPU cores Ray may use when it is started here; default: all")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where the model comes from and where it goes."""

    hf_checkpoint: str = setting("", "model to start from: an HF checkpoint folder or a hub name (required)")
    ref_load: str | None = setting(
        None,
        "HF checkpoint of the reference model; default: the policy as the run begins, of --hf-checkpoint or, with "
        "--finetune, of --load",
    )
    load: str | None = setting(None, "resume from the newest checkpoint here; if it is --save and empty: begin")
    ckpt_step: int | None = setting(None, "resume from the checkpoint of this rollout; default: the newest")
    finetune: bool = setting(False, "take the weights of --load alone; counters, data and optimizer begin anew")
    save: str | None = setting(None, "folder for training checkpoints; default: none are written")
    save_interval: int | None = setting(None, "write a checkpoint every this many rollouts; the last is always written")
    async_save: bool = setting(False, "go on while a checkpoint is written; takes a copy of it in the host's memory")
    no_save_checksums: bool = setting(
        False, "leave the files' checksums out of checkpoints: a resume compares sizes alone, and reads nothing twice"
    )
    keep_last_checkpoints: int | None = setting(None, "newest checkpoints that stay in --save; default: all")
    keep_best_checkpoint: str | None = setting(
        None, "also keep the best one by this metric of its step: METRIC, METRIC:max (the same) or METRIC:min"
    )
    save_hf: str | None = setting(None, "write an HF checkpoint here when training ends; {rollout_id} is replaced")
    save_hf_interval: int | None = setting(None, "write one every this many rollouts, too")
    no_save_optim: bool = setting(False, "leave optimizer and random state out of checkpoints (they cannot be resumed)")
    no_load_optim: bool = setting(False, "resume the weights only")

    @property
    def goes_on(self) -> bool:
        """Whether --load is the folder of --save, however the two are spelt: such a run goes on with itself."""
        return None not in (self.load, self.save) and os.path.realpath(str(self.load)) == os.path.realpath(
            str(self.save)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts."""

    prompt_data: list[str] = setting([], "JSONL or Parquet files of prompts, folders of them, or slices path@[a:b]")
    prompt_data_weights: list[float] = setting([], "mix the prompt data in these shares; default: one after another")
    input_key: str = setting("input", "key of the prompt: a string, or a list of chat messages")
    label_key: str | None = setting(None, "key of the reference answer")
    metadata_key: str = setting("metadata", "key of a JSON object kept with the sample")
    tool_key: str = setting("tools", "key of the tool definitions handed to the chat template")
    apply_chat_template: bool = setting(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "JSON object of further arguments to the chat template")
    sft_turns: str = setting(
        "all", "assistant's turns that supervised training learns, by conversation", choices=("all", "last")
    )
    sft_overlong: str = setting(
        "cut", "answers of supervised data above --rollout-max-response-len or the context", choices=("cut", "drop")
    )
    rollout_shuffle: bool = setting(False, "shuffle the prompts anew each epoch, seeded by --rollout-seed")
    rollout_seed: int = setting(42, "seed of the shuffle and of sampling")
    rollout_max_prompt_len: int | None = setting(None, "drop prompts of more tokens than this")
    data_source_path: str | None = setting(None, "dotted path of a DataSource class, in the place of the data buffer")
    disable_rollout_global_dataset: bool = setting(
        False, "read no prompts: the rollout function, or the generate function, makes its own"
    )
    buffer_filter_path: str | None = setting(
        None, "dotted path of (config, rollout_id, buffer, n) -> list of at most n groups put back, to go on with"
    )
    buffer_sort_by_staleness: bool = setting(False, "hand out groups put back by the age of their policy, oldest first")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Generation."""

    num_rollout: int | None = setting(None, "rollouts to run; or give --num-epoch")
    num_epoch: int | None = setting(None, "epochs over the prompts, when --num-rollout is not given")
    start_rollout_id: int | None = setting(None, "number of the first rollout; default: 0, or where --load stopped")
    rollout_batch_size: int = setting(0, "prompts per rollout (required)")
    n_samples_per_prompt: int = setting(1, "samples per prompt: the group size")
    over_sampling_batch_size: int | None = setting(None, "prompts asked for at a time; default: as many as are missing")
    partial_rollout: bool = setting(
        False, "keep the tokens of groups aborted as surplus and go on with them in a later rollout"
    )
    mask_offpolicy_in_partial_rollout: bool = setting(
        False, "with --partial-rollout: no gradient for tokens that an earlier rollout sampled"
    )
    rollout_function_path: str = setting(
        "vime.rollout.vllm_rollout.generate_rollout", "dotted path of the rollout function"
    )
    eval_function_path: str | None = setting(None, "dotted path of the rollout function of evaluation")
    custom_generate_function_path: str | None = setting(
        None, "dotted path of async (config, sample, sampling_params) -> Sample; metadata.generate_function_path wins"
    )
    custom_generate_timeout_s: float | None = setting(
        None, "seconds a custom generate function may take for one sample, which then fails; default: no limit"
    )
    custom_generate_max_retries: int = setting(
        0, "further calls of a custom generate function that raised or took too long, each after a longer wait"
    )
    rollout_sample_hook_path: list[str] = setting(
        [], "dotted paths of functions (config, sample, *, rollout_id, evaluation), on each sample before its reward"
    )
    dynamic_sampling_filter_path: str | None = setting(
        None, "dotted path of a filter (config, samples) -> bool or FilterOutput; a dropped group is replaced"
    )
    rollout_sample_filter_path: str | None = setting(
        None, "dotted path of a function (config, groups) that marks samples not to be learnt from (remove_sample)"
    )
    rollout_all_samples_process_path: str | None = setting(
        None, "dotted path of a function (config, all_groups, data_source) that sees dropped and failed groups as well"
    )
    custom_convert_samples_to_train_data_path: str | None = setting(
        None, "dotted path of a function (config, samples) -> columns of the training batch by name"
    )
    rollout_data_postprocess_path: str | None = setting(
        None, "dotted path of a function (config, rollout_id, batch) that may change the batch before it is trained on"
    )
    custom_rollout_log_function_path: str | None = setting(
        None, "dotted path of a function (config, rollout_id, groups, metrics, seconds); True: no other rollout metrics"
    )
    custom_eval_rollout_log_function_path: str | None = setting(
        None, "dotted path of a function (config, rollout_id, groups, metrics); True: no other metrics of evaluation"
    )
    rollout_temperature: float = setting(1.0, "sampling temperature, above 0; log-probs are of the same temperature")
    rollout_top_p: float = setting(1.0, "nucleus sampling, with --rollout-top-k; 1: none")
    rollout_top_k: int = setting(-1, "sample from the k most likely tokens; -1: from all")
    rollout_min_p: float = setting(
        0.0, "leave out what is less likely than so many times the most likely, with --rollout-top-k; 0: nothing"
    )
    rollout_max_response_len: int = setting(1024, "tokens a response may have")
    rollout_max_context_len: int | None = setting(None, "tokens prompt and response may have together")
    rollout_stop: list[str] = setting([], "strings that end a response")
    rollout_stop_token_ids: list[int] = setting([], "token ids that end a response")
    rollout_skip_special_tokens: bool = setting(True, "leave special tokens out of the response text given to rewards")
    rollout_concurrency: int = setting(512, "requests in flight at a time, over all engines")
    deterministic: bool = setting(
        False,
        "generate in fixed batches, so that two synchronous runs on a CPU have the same losses, also resumed",
    )
    rollout_request_seeds: bool = setting(
        True,
        "seed each request from --rollout-seed, rollout and group; --no-rollout-request-seeds lets engines draw from "
        "one stream, which is faster where vLLM draws seeded samples one by one",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Scoring."""

    rm_type: str | None = setting(
        None, "built-in reward (docs/rewards.md lists them); a sample's metadata.rm_type wins"
    )
    rm_parts: dict[str, float] = setting(
        {}, "weighted sum of rewards, each a built-in's name or a dotted path: math=1.0 my.module.format=0.1"
    )
    custom_rm_path: str | None = setting(None, "dotted path of a function (config, sample) -> float or dict of floats")
    group_rm: bool = setting(False, "the custom reward scores a whole group: (config, samples) -> list")
    custom_reward_post_process_path: str | None = setting(
        None, "dotted path of a function (config, samples) -> (raw_rewards, rewards), rewards being the advantages"
    )
    reward_key: str | None = setting(
        None, "entry of a dict reward to train on; default: total with --rm-parts, score with --rm-type dapo"
    )
    rm_timeout_s: float = setting(
        10.0, "seconds a built-in or plain `def` reward may take for one sample before its process is killed"
    )
    rm_num_workers: int = setting(1, "grader processes")
    rm_memory_limit_bytes: int = setting(2 << 30, "address space of a grader process")
    custom_rm_timeout_s: float = setting(600.0, "seconds an `async def` reward may take for one sample or group")
    rm_failure_reward: float | None = setting(
        None,
        "reward of a sample whose custom or remote reward timed out or crashed; default: its group is generated anew",
    )
    rm_url: str | None = setting(None, "address of the reward server that --rm-type remote_rm asks")
    rm_url_timeout_s: float = setting(60.0, "seconds one request to the reward server may take")
    rm_url_max_retries: int = setting(10, "further requests for a sample after a failure that may pass")
    rm_url_max_connections: int = setting(64, "requests to the reward server at a time")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation (docs/evaluation.md). Sampling settings default to the rollout's."""

    eval_interval: int | None = setting(None, "evaluate every this many rollouts, and after the last")
    eval_prompt_data: list[str] = setting([], "pairs NAME PATH of held-out sets")
    eval_config: str | None = setting(None, "YAML file of held-out sets with settings of their own (eval.datasets)")
    skip_eval_before_train: bool = setting(False, "do not evaluate before the first step")
    eval_input_key: str | None = setting(None, "default: --input-key")
    eval_label_key: str | None = setting(None, "default: --label-key")
    eval_tool_key: str | None = setting(None, "default: --tool-key")
    n_samples_per_eval_prompt: int = setting(1, "samples per held-out prompt")
    eval_temperature: float | None = setting(None, "0 is greedy; default: --rollout-temperature")
    eval_top_p: float | None = setting(None, "nucleus sampling in evaluation; default: --rollout-top-p")
    eval_top_k: int | None = setting(None, "top-k sampling in evaluation; default: --rollout-top-k")
    eval_min_new_tokens: int = setting(0, "tokens a held-out response has at least; it cannot end before")
    eval_max_response_len: int | None = setting(None, "default: --rollout-max-response-len")
    eval_max_prompt_len: int | None = setting(None, "drop held-out prompts of more tokens; default: none is dropped")
    eval_max_context_len: int | None = setting(None, "default: --rollout-max-context-len")
    eval_reward_key: str | None = setting(None, "entry of a dict reward to report; default: --reward-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Batching and the learning-rate schedule. Model, optimizer and parallelism settings are Megatron's own flags."""

    global_batch_size: int | None = setting(None, "trajectories per optimizer step; default: one step per rollout")
    num_steps_per_rollout: int | None = setting(None, "optimizer steps per rollout, instead of --global-batch-size")
    micro_batch_size: int = setting(1, "samples per forward pass when --use-dynamic-batch-size is off")
    use_dynamic_batch_size: bool = setting(False, "fill micro-batches up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = setting(None, "tokens in one forward pass of one rank")
    log_probs_max_tokens_per_gpu: int | None = setting(None, "the same without gradients; default: as with them")
    use_routing_replay: bool = setting(
        False, "experts: the optimizer steps of a rollout replay what the old policy's forward pass chose"
    )
    log_probs_chunk_size: int | None = setting(
        None, "tokens whose logits are held at a time in log-prob and entropy; default: as many as take 512 MiB"
    )
    aligned: bool = setting(
        False, "trainer and engines compute by kernels that agree as closely as they can, at the cost of speed"
    )
    use_rollout_routing_replay: bool = setting(
        False, "experts: the trainer uses those that the engines routed each token to (R3, docs/routing_replay.md)"
    )
    lr_decay_style: str = setting(
        "constant", "learning-rate schedule", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = setting(None, "optimizer steps of the schedule; default: all of the run")
    lr_warmup_iters: int = setting(0, "optimizer steps of linear warm-up")
    lr_warmup_init: float = setting(0.0, "learning rate the warm-up starts from")
    custom_model_provider_path: str | None = setting(
        None, "dotted path of a function (config, pre_process, post_process, build) -> model, for Megatron"
    )
    custom_megatron_init_path: str | None = setting(
        None, "dotted path of a function (config), called on every rank before the model is built"
    )
    custom_megatron_before_log_prob_hook_path: str | None = setting(
        None, "dotted path of a function (config, model, store_prefix), called before log-probs are computed"
    )
    custom_megatron_before_train_step_hook_path: str | None = setting(
        None, "dotted path of a function (config, rollout_id, step_id, model, optimizer, scheduler)"
    )
    stop_metric: str | None = setting(None, "end training early by this metric, such as train/loss")
    stop_below: float | None = setting(None, "end when its mean over --stop-window rollouts is at most this")
    stop_above: float | None = setting(None, "end when its mean over --stop-window rollouts is at least this")
    stop_window: int = setting(10, "rollouts that --stop-metric is averaged over")
    seed: int = setting(1234, "seed of training")
    distributed_timeout_minutes: int = setting(10, "collectives that take longer fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Weight sync: trainer to engines."""

    update_weight_transport: str = setting(
        "auto",
        "how weights travel; auto: ipc (colocated) or nccl on CUDA, on the CPU shm on one node and gloo across nodes",
        choices=("auto", "ipc", "nccl", "shm", "disk", "gloo"),
    )
    update_weights_interval: int = setting(1, "rollouts that are generated by the same weights, until the next sync")
    update_weight_buffer_size: int = setting(
        512 << 20, "bytes of one bucket; the sender holds two, on its device with ipc and nccl"
    )
    update_weight_disk_dir: str | None = setting(None, "folder of the disk transport; default: inside the run folder")
    update_weight_timeout_s: float = setting(
        300.0, "seconds that engines may take to come to a gloo or nccl sync, and that one of its buckets may travel"
    )
    custom_update_weight_post_write_path: str | None = setting(
        None, "dotted path of a function (config, path, version), called with each file of the disk transport"
    )
    weight_probe_interval: int = setting(
        50,
        "probe the engines (greedy tokens re-scored by the trainer) every this many syncs, and at the first; 0: never",
    )
    weight_probe_tolerance: float | None = setting(
        None, "log-prob difference a probe may show: at any token in float32 (default 1e-4), on average in bf16 (0.1)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Runs of one half of the pipeline, and what they exchange. docs/debugging.md shows them."""

    debug_rollout_only: bool = setting(False, "start no trainer: generate rollouts with the weights as they are")
    debug_train_only: bool = setting(False, "start no engines: train on --load-debug-rollout-data")
    save_debug_rollout_data: str | None = setting(
        None, "write a copy of each rollout to this Parquet file; {rollout_id} is replaced"
    )
    load_debug_rollout_data: str | None = setting(
        None, "train on these rollouts instead of generating: a run's folder, or a path with {rollout_id}"
    )
    load_debug_rollout_data_subsample: float | None = setting(
        None, "part of each loaded rollout's groups to train on, 0 to 1; default: all"
    )
    save_debug_train_data: str | None = setting(
        None, "write each training batch to this .npz file; {rollout_id} is replaced"
    )
    dump_details: str | None = setting(None, "folder for both --save-debug-rollout-data and --save-debug-train-data")
    profile: bool = setting(False, "profile the training of some rollouts: a range for nsys (CUDA only), or")
    use_pytorch_profiler: bool = setting(False, "with --profile: torch's traces in the run folder's profile/")
    profile_step_start: int = setting(10, "first rollout to profile")
    profile_step_end: int = setting(12, "rollout before which profiling ends")
    profile_ranks: list[int] = setting([0], "training ranks to profile, and whose memory is recorded")
    record_memory_history: bool = setting(False, "record CUDA's memory and write a snapshot after some rollouts")
    memory_snapshot_dir: str | None = setting(None, "folder of the snapshots; default: memory/ in the run folder")
    memory_snapshot_num_steps: int = setting(1, "rollouts to record; a run out of memory writes one at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The run folder and what is written there."""

    run_dir: str = setting("runs/{time}", "folder of this run; {time} is replaced by its start time")
    use_tensorboard: bool = setting(False, "write TensorBoard events under the run folder")
    use_wandb: bool = setting(False, "log to Weights & Biases (package wandb; key from WANDB_API_KEY or `wandb login`)")
    wandb_mode: str = setting(
        "online", "offline writes files that `wandb sync` uploads later", choices=("online", "offline", "disabled")
    )
    wandb_dir: str | None = setting(None, "folder of wandb's own files; default: inside the run folder")
    wandb_project: str = setting("vime", "W&B project")
    wandb_group: str | None = setting(None, "W&B group of this run")
    wandb_team: str | None = setting(None, "W&B team (entity); default: the key's own")
    wandb_run_id: str | None = setting(None, "id of a W&B run to start or go on with; default: a resumed run's own")
    wandb_host: str | None = setting(None, "address of a W&B server of your own; default: WANDB_BASE_URL, or wandb.ai")
    trace: bool = setting(False, "write trace_<first rollout>.json into the run folder, which Perfetto opens")
    trace_max_mib: int = setting(256, "MiB the trace may take; steps beyond that are not traced")
    no_save_rollouts: bool = setting(False, "do not keep the samples of rollouts and evaluations")
    engine_start_timeout_s: float = setting(600.0, "seconds an engine may take to start")
