"""Which stages a run has: pure questions to the settings."""

from __future__ import annotations

from vime.config import Config

DEFAULT_ROLLOUT = "vime.rollout.vllm_rollout.generate_rollout"
SFT_ROLLOUT = "vime.rollout.sft_rollout.generate_rollout"


def evaluates_only(config: Config) -> bool:
    """Whether the run evaluates the weights it starts from, and that is all."""
    return config.rollout.num_rollout == 0


def trains(config: Config) -> bool:
    """Whether the run starts a trainer. To evaluate it is only needed to read a training checkpoint."""
    if evaluates_only(config) and config.checkpoint.load is None:
        return False
    return not config.debug.debug_rollout_only


def evaluates_without_trainer(config: Config) -> bool:
    """Whether engines alone do the run, and no prompts to train on are read."""
    return evaluates_only(config) and not trains(config)


def replays(config: Config) -> bool:
    """Whether the rollouts come from files of an earlier run."""
    return config.debug.load_debug_rollout_data is not None


def reads_prompts(config: Config) -> bool:
    """Whether vime itself reads --prompt-data (a data source of the user's may read it in its own way)."""
    data = config.data
    if replays(config) or evaluates_without_trainer(config):
        return False
    return data.data_source_path is None and not data.disable_rollout_global_dataset


def generates(config: Config) -> bool:
    """Whether the run samples from engines (supervised training and replays do not)."""
    return (config.algo.loss_type != "sft_loss" or evaluates_only(config)) and not replays(config)


def engines_return_experts(config: Config) -> bool:
    """Whether engines are to say which experts they routed tokens to."""
    return config.train.use_rollout_routing_replay and generates(config) and not evaluates_only(config)


def samples_narrowly(config: Config) -> bool:
    """Whether rollouts are drawn from a part of the vocabulary."""
    rollout = config.rollout
    return rollout.rollout_top_p < 1.0 or rollout.rollout_top_k > 0 or rollout.rollout_min_p > 0.0


def engines_return_support(config: Config) -> bool:
    """Whether engines are to say what they could have sampled in the place of each token."""
    return samples_narrowly(config) and generates(config) and not evaluates_only(config)


def learns_answers(config: Config) -> bool:
    """Whether the rows' answers are what is learnt, by vime's own rollout function of supervised training."""
    return config.rollout.rollout_function_path == SFT_ROLLOUT


def rollout_data_to_save(config: Config) -> str | None:
    """Where a copy of each rollout goes, with {rollout_id} in it."""
    return config.debug.save_debug_rollout_data or _detail(config, "rollout_data/{rollout_id}.parquet")


def train_data_to_save(config: Config) -> str | None:
    """Where each training batch goes, with {rollout_id} in it."""
    return config.debug.save_debug_train_data or _detail(config, "train_data/{rollout_id}.npz")


def _detail(config: Config, name: str) -> str | None:
    return None if config.debug.dump_details is None else f"{config.debug.dump_details}/{name}"
