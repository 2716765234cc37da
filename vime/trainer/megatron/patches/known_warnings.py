"""Warnings of megatron-core 0.16.1 and torch that say nothing to a user of vime; others still show."""

from __future__ import annotations

import warnings

# What vime does about each: it needs neither library, and does not call what is deprecated.
_KNOWN = (
    r"(Transformer Engine and )?Apex (is|are) not installed",  # torch-native layers and optimizers are used on purpose
    r"full scope is deprecated",  # a default of TransformerConfig, about CUDA graphs that are not used
    r"The \.grad attribute of a Tensor that is not a leaf",  # the distributed optimizer looks at views of its buffer
    r"`torch\.distributed\.\w+` is deprecated",  # collectives called by megatron-core
    r"`load_state_dict` is deprecated",  # torch's checkpointing as megatron-core calls it, on --load
    r"Please use DTensor instead",  # the same
    # The CUDA platform sets it; elsewhere it means nothing.
    r"When using (sequence parallelism|async grad allreduce) it is recommended to set the environment variable CUDA_",
)


def silence() -> None:
    """Filter the known warnings in this process; call before megatron-core is imported, which emits some."""
    for message in _KNOWN:
        warnings.filterwarnings("ignore", message=message)
