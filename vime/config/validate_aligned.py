"""Cross-checks of --aligned."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config

_ENGINE_SETTINGS = ("compilation_config", "additional_config")
"""What engines on a CPU are told by it."""


def check_aligned(config: Config, platform: str | None) -> Iterator[str]:
    """What contradicts trainer and engines that compute by the same kernels. Args: platform: its name, if known."""
    if not config.train.aligned:
        return
    if config.algo.loss_type == "sft_loss":
        yield "--aligned has the trainer compute as engines do, but --loss-type sft_loss asks none; drop it"
    if platform != "cpu":
        return
    for name in _ENGINE_SETTINGS:
        if config.vllm.get(name) is not None:
            yield f"--vllm-{name.replace('_', '-')} is what --aligned sets on a CPU; drop one of the two"
    if (size := config.megatron.get("context_parallel_size") or 1) > 1:
        yield (
            f"--context-parallel-size is {size}, but --aligned computes the attention of whole sequences on a CPU; use "
            "1, or drop --aligned"
        )
