"""The server that teaches a run, checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.config import Config, modes
from vime.config.hf import load_tokenizer
from vime.config.validate_teacher import teacher_is_served
from vime.rollout.teacher import ServedTeacher


def served_teacher(config: Config, hf_path: Path, hf_config: dict[str, Any]) -> ServedTeacher | None:
    """The teacher that rollouts ask; None where there is none, or it is in the trainer, or no rollout is generated.

    With --debug-rollout-only it is asked, too: the files are to be trained on. Raises: ConfigError.
    """
    if not teacher_is_served(config) or not modes.generates(config) or modes.evaluates_only(config):
        return None
    key_file = config.teacher.opd_teacher_key_file
    key = None if key_file is None else Path(key_file).read_text(encoding="utf-8").strip()
    teacher = ServedTeacher(config.teacher, key)
    longest = config.rollout.rollout_max_context_len or int(hf_config["max_position_embeddings"])
    teacher.check(load_tokenizer(hf_path), longest)
    return teacher
