"""Whether the HF checkpoints that a run begins with, policy and reference, hold what it needs, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.dtype import stored_dtype
from vime.config.estimators import needs_reference
from vime.config.hf import token_problem, tokenizer_problem
from vime.config.hf_weights import read_json_object
from vime.config.modes import trains
from vime.errors import ConfigError
from vime.models import ModelSettings, family_of
from vime.models.stored import checked_weights, reference_problem, vocabulary_problem
from vime.models.value_head import CriticNames, trunk_config, untied

_REMEDY = "give --bf16 to have all in bfloat16, or --no-bf16 to have all in float32"


def check_checkpoint_files(config: Config, folder: Path, model: Mapping[str, Any]) -> None:
    """Look at a checkpoint's tokenizer and weights: names, shapes and dtypes, from the heads of its files.

    Contents are only read where a model with a tied head has a head of its own besides.

    Args:
        folder: --hf-checkpoint, here.
        model: its config.json.
    Raises: ConfigError with everything that is wrong.
    """
    problems = [*filter(None, [tokenizer_problem(folder)])]
    family = family_of(model)
    settings = family.settings(model)
    try:
        # Without --bf16 or --no-bf16 everything is trained and served in the one dtype that config.json states.
        dtype = stored_dtype(model) if config.megatron.get("bf16") is None else None
        checked_weights(folder, family.name_map(settings), settings, dtype=dtype, remedy=_REMEDY, reads_head=True)
    except ConfigError as error:
        problems += error.problems
    if needs_reference(config.algo) and config.checkpoint.ref_load is not None and trains(config):
        problems += _reference_problems(Path(config.checkpoint.ref_load), settings, folder, flag="--ref-load")
    if config.algo.use_opd and config.teacher.opd_teacher_load is not None and trains(config):
        teacher = Path(config.teacher.opd_teacher_load)
        problems += _teacher_problems(teacher, settings, folder)
    if config.critic.critic_load is not None and trains(config):
        problems += _critic_problems(Path(config.critic.critic_load), settings, folder)
    if problems:
        raise ConfigError(problems)


def _reference_problems(folder: Path, policy: ModelSettings, policy_folder: Path, *, flag: str) -> list[str]:
    """What is wrong with a checkpoint whose weights take the policy's place."""
    try:
        hf = read_json_object(folder / "config.json")
        family = family_of(hf)
        settings = family.settings(hf)
        if problem := reference_problem(folder, settings, policy, policy_folder=policy_folder, flag=flag):
            return [problem]
        checked_weights(folder, family.name_map(settings), settings, reads_head=True)
    except ConfigError as error:
        return [f"{flag}: {problem}" for problem in error.problems]
    return []


def _teacher_problems(folder: Path, policy: ModelSettings, policy_folder: Path) -> list[str]:
    """What is wrong with the checkpoint of a teacher, which may be of another architecture, but of the same tokens."""
    flag = "--opd-teacher-load"
    try:
        family = family_of(hf := read_json_object(folder / "config.json"))
        settings = family.settings(hf)
        if problem := vocabulary_problem(folder, settings, policy, flag=flag):
            return [problem]
        checked_weights(folder, family.name_map(settings), settings, reads_head=True)
    except ConfigError as error:
        return [f"{flag}: {problem}" for problem in error.problems]
    return [*filter(None, [token_problem(folder, policy_folder, flag=flag)])]


def _critic_problems(folder: Path, policy: ModelSettings, policy_folder: Path) -> list[str]:
    """What is wrong with the checkpoint a critic begins with, whose layers are the policy's."""
    try:
        hf = trunk_config(read_json_object(folder / "config.json"), tied=policy.tie_word_embeddings)
        settings = family_of(hf).settings(hf)
        if problem := reference_problem(folder, settings, policy, policy_folder=policy_folder, flag="--critic-load"):
            return [problem]
        checked_weights(folder, CriticNames(family_of(hf).name_map(settings), settings), untied(settings))
    except ConfigError as error:
        return [f"--critic-load: {problem}" for problem in error.problems]
    return []
