"""The reference policy: a frozen model of the policy's architecture, for the KL in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vime.errors import ConfigError
from vime.models import ModelSettings, NameMap, family_of
from vime.models.stored import reference_problem
from vime.trainer.megatron import hf_io


def build_reference(
    folder: Path,
    policy: ModelSettings,
    names: NameMap,
    build: Callable[[ModelSettings], tuple[Sequence[torch.nn.Module], Sequence[torch.nn.Module]]],
    *,
    policy_folder: Path,
) -> list[torch.nn.Module]:
    """The model of an HF checkpoint, chunk by chunk, wrapped for the dtype it computes in.

    Args:
        folder: the checkpoint.
        policy, names: of the policy, whose architecture it must have.
        build: settings -> this rank's chunks with fresh weights, and their wrappers.
        policy_folder: named in errors.
    Raises: ConfigError if it is of another architecture or vocabulary.
    """
    settings = family_of(hf := hf_io.read_config(folder)).settings(hf)
    if problem := reference_problem(folder, settings, policy, policy_folder=policy_folder):
        raise ConfigError(problem)
    chunks, wrapped = build(settings)
    hf_io.load_hf(chunks, folder, names, settings)
    return [module.requires_grad_(False).eval() for module in wrapped]
