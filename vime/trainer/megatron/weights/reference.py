"""The reference policy: weights of the policy's architecture, for the KL, in host memory until they are needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from vime.errors import ConfigError
from vime.models import ModelSettings, NameMap, family_of
from vime.models.stored import reference_problem
from vime.trainer.megatron.weights import hf_io
from vime.trainer.megatron.weights.host_weights import HostWeights

_log = logging.getLogger(__name__)


def load_reference(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    policy: ModelSettings,
    names: NameMap,
    *,
    policy_folder: Path,
    dtype: torch.dtype,
    flag: str = "--ref-load",
) -> HostWeights:
    """The weights of an HF checkpoint, beside those of a policy.

    Args:
        folder: the checkpoint.
        chunks: this rank's part of the policy, trained already or not; its own weights stay as they are.
        policy, names: of the policy, whose architecture it must have.
        policy_folder: where the policy's weights came from; if it is `folder`, they are not read again.
        dtype: of the weights in this run.
        flag: by which the user named the folder.
    Raises: ConfigError if it is of another architecture or vocabulary.
    """
    weights = HostWeights(chunks)
    if folder.resolve() == policy_folder.resolve():
        return weights
    settings = family_of(hf := hf_io.read_config(folder)).settings(hf)
    if problem := reference_problem(folder, settings, policy, policy_folder=policy_folder, flag=flag):
        raise ConfigError(problem)
    own = str(dtype).removeprefix("torch.")
    if settings.dtype != own and dist.get_rank() == 0:
        verb = "rounded to" if own == "bfloat16" else "computed with in"
        _log.warning(
            "%s %s is stored in %s and is %s %s, the dtype of this run", flag, folder, settings.dtype, verb, own
        )
    with weights.in_place():
        hf_io.load_hf(chunks, folder, names, settings)
    return weights
