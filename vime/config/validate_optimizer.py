"""Checks of the optimizer's settings, which are Megatron's, and of the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vime.config import Config

# (Megatron field, least value, value it must stay below)
_OPTIMIZER_RANGES = (
    ("adam_beta1", 0, 1.0),
    ("adam_beta2", 0, 1.0),
    ("adam_eps", 0, math.inf),
    ("weight_decay", 0, math.inf),
    ("min_lr", 0, math.inf),
    ("clip_grad", 0, math.inf),
)


def check_optimizer(config: Config) -> Iterator[str]:
    """Ranges, and numbers that contradict each other."""
    megatron, train = config.megatron, config.train
    lr, low = megatron.get("lr"), megatron.get("min_lr")
    if lr is not None and lr < 0:
        yield f"--lr is {lr}, but must be at least 0"
    if lr is not None and low is not None and low > lr:
        yield f"--min-lr is {low}, above --lr {lr}"
    if lr is not None and train.lr_warmup_init > lr:
        yield f"--lr-warmup-init is {train.lr_warmup_init}, above --lr {lr}, which the warm-up rises to"
    if train.lr_decay_iters is not None and 0 < train.lr_decay_iters <= train.lr_warmup_iters:
        yield f"--lr-warmup-iters is {train.lr_warmup_iters}, not below --lr-decay-iters {train.lr_decay_iters}"
    for name, least, below in _OPTIMIZER_RANGES:
        value = megatron.get(name)
        if value is not None and not (least <= value < below):
            yield f"--{name.replace('_', '-')} is {value}, but must be at least {least}" + (
                f" and below {below:g}" if below < math.inf else ""
            )
    fraction = megatron.get("optimizer_offload_fraction")
    if fraction is not None and not 0 < fraction <= 1:
        yield f"--optimizer-offload-fraction is {fraction}, but must be above 0 and at most 1"
    if megatron.get("make_vocab_size_divisible_by", 1) < 1:
        yield f"--make-vocab-size-divisible-by is {megatron['make_vocab_size_divisible_by']}, but must be at least 1"
    if megatron.get("bf16") and megatron.get("fp16"):
        yield "--bf16 and --fp16 are both given; keep one"
