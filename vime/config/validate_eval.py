"""Checks of runs that only evaluate (--num-rollout 0, `vime eval`)."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config
from vime.config.eval_sets import eval_sets, has_eval_sets
from vime.config.modes import SFT_ROLLOUT, evaluates_only, replays, trains
from vime.errors import ConfigError

_SAMPLES = "vime.rollout.vllm_rollout.generate_rollout"


def check_evaluation(config: Config) -> Iterator[str]:
    """Whether a run without rollouts has something to evaluate, and something to score it with."""
    if not evaluates_only(config):
        return
    rollout, exports = config.rollout, config.checkpoint.load is not None and config.checkpoint.save_hf is not None
    if replays(config) or config.debug.debug_train_only:
        yield "--num-rollout is 0, so that nothing is replayed or trained; give the number of rollouts to replay"
        return
    if not has_eval_sets(config):
        if not exports:
            yield (
                "there is nothing to evaluate: give held-out sets (--eval-prompt-data NAME PATH, or --eval-config); to "
                "train, give a --num-rollout above 0"
            )
        return
    if config.eval.skip_eval_before_train:
        yield "--skip-eval-before-train leaves out the evaluation that --num-rollout 0 is for; drop one of the two"
    if (rollout.eval_function_path or rollout.rollout_function_path) == SFT_ROLLOUT:
        yield f"{SFT_ROLLOUT} samples nothing, so that it cannot evaluate; add --eval-function-path {_SAMPLES}"
    if not trains(config):
        yield from _check_rewards(config)


def _check_rewards(config: Config) -> Iterator[str]:
    """Training's own checks see to this where a trainer starts."""
    reward = config.reward
    if reward.rm_type or reward.rm_parts or reward.custom_rm_path or config.rollout.eval_function_path:
        return
    try:
        unscored = [s.name for s in eval_sets(config) if s.rm_type is None and s.custom_generate_function_path is None]
    except ConfigError:
        return  # said by check_eval_sets
    if unscored:
        yield (
            f"a reward is required for {', '.join(unscored)}: --rm-type, --rm-parts, --custom-rm-path, or rm_type in "
            "the set's entry of --eval-config (sample metadata may then override it)"
        )
