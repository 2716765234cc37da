"""Checks of --deterministic: what would make two runs differ, or a resumed one from one that was never killed."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config, RolloutConfig
from vime.config.modes import generates
from vime.config.validate_cluster import engine_devices
from vime.config.validate_teacher import teacher_is_served


def check_deterministic(config: Config, *, overlapped: bool) -> Iterator[str]:
    """Settings that leave to chance which samples are computed together, or when.

    Args: overlapped: rollouts are generated while the trainer trains (train_async.py).
    """
    if not config.rollout.deterministic or not generates(config):
        return
    for problem in (*_loop(config, overlapped), *_rollout(config.rollout), *_engines(config)):
        yield f"--deterministic: {problem}"


def _loop(config: Config, overlapped: bool) -> Iterator[str]:
    if overlapped:
        yield "train_async.py generates while it trains, and what is finished when is chance; use train.py"
    if teacher_is_served(config):
        yield "a served teacher scores beside other requests; use --opd-type megatron"


def _rollout(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.over_sampling_batch_size is not None:
        yield "--over-sampling-batch-size keeps the groups that finish first, which is chance; leave it out"
    if rollout.partial_rollout:
        yield "--partial-rollout stops samples where they happen to be; leave it out"
    if not rollout.rollout_request_seeds:
        yield "--no-rollout-request-seeds draws all samples from one stream; leave it out"
    if rollout.custom_generate_function_path is not None:
        yield "requests of --custom-generate-function-path come when it likes; leave one of the two out"
    if rollout.rollout_function_path != RolloutConfig().rollout_function_path:
        yield f"--rollout-function-path {rollout.rollout_function_path} does not make fixed batches; leave it out"


def _engines(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.rollout_external_engine_addrs:
        yield "engines of --rollout-external-engine-addrs are started without fixed batches; leave them out"
    elif (count := engine_devices(cluster) // max(cluster.rollout_num_gpus_per_engine, 1)) > 1:
        yield (
            f"{count} engines share requests as they come; use one (--rollout-num-gpus "
            f"{cluster.rollout_num_gpus_per_engine})"
        )
    if config.train.use_rollout_routing_replay:
        yield "--use-rollout-routing-replay needs vLLM's prefix cache, which is off: what it holds is chance; drop one"
    for name, why in (
        ("enable_prefix_caching", "what is cached depends on what came before"),
        ("async_scheduling", "it schedules ahead of the answers"),
        ("scheduler_cls", "vime's own makes the fixed batches"),
    ):
        if config.vllm.get(name):
            yield f"--vllm-{name.replace('_', '-')} cannot be given: {why}; leave it out"
