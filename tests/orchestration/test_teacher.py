"""Which runs ask a teacher's server, and for samples of what length."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.config import AlgoConfig, CheckpointConfig, Config, DebugConfig, RolloutConfig, TeacherConfig
from vime.orchestration import teacher as module
from vime.orchestration.teacher import served_teacher
from vime.rollout.teacher import ServedTeacher

CONFIG = Config(
    algo=AlgoConfig(use_opd=True),
    teacher=TeacherConfig(opd_teacher_url="http://127.0.0.1:1"),
    rollout=RolloutConfig(num_rollout=4, rollout_max_context_len=64),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that servers were asked about before a run."""
    lengths: list[int] = []

    def check(self: ServedTeacher, tokenizer: Any, max_len: int) -> None:
        lengths.append(max_len)

    monkeypatch.setattr(ServedTeacher, "check", check)
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: None)
    return lengths


def test_a_run_that_generates_what_is_trained_on_asks_its_teacher(asked: list[int]) -> None:
    hf = {"max_position_embeddings": 128}
    assert served_teacher(CONFIG, Path(), hf) is not None
    kept = replace(CONFIG, debug=DebugConfig(debug_rollout_only=True))  # its files are trained on later
    assert served_teacher(kept, Path(), hf) is not None
    whole = replace(CONFIG, rollout=replace(CONFIG.rollout, rollout_max_context_len=None))
    longer = replace(whole, eval=replace(whole.eval, eval_prompt_data=["a", "b"], eval_max_context_len=4096))
    assert served_teacher(longer, Path(), hf) is not None
    assert asked == [64, 64, 128]  # of samples that are trained on: evaluation's may be longer


def test_a_run_that_needs_no_server_asks_none(asked: list[int]) -> None:
    others = (
        replace(CONFIG, algo=AlgoConfig()),
        replace(CONFIG, teacher=TeacherConfig(opd_teacher_load="x")),
        replace(CONFIG, debug=DebugConfig(load_debug_rollout_data="x")),
        replace(CONFIG, rollout=RolloutConfig(num_rollout=0), checkpoint=CheckpointConfig(load="x")),
    )
    assert [served_teacher(config, Path(), {"max_position_embeddings": 128}) for config in others] == [None] * 4
    assert asked == []
