"""Distillation and older policies: what contradicts them is refused before anything starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.config import AlgoConfig, Config, RolloutConfig, SyncConfig, TeacherConfig
from vime.config.unread import unread_settings
from vime.config.validate_algo import check_algorithm
from vime.config.validate_teacher import check_old_actor, check_teacher

URL = "http://127.0.0.1:8100"


def taught(*, coef: float = 1.0, temperature: float = 1.0, **settings: Any) -> Config:
    return Config(
        algo=AlgoConfig(use_opd=True, opd_kl_coef=coef),
        teacher=TeacherConfig(**settings),
        rollout=RolloutConfig(num_rollout=1, rollout_temperature=temperature),
    )


def test_one_teacher_is_needed_and_one_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    load = str(tmp_path)
    for right in (taught(opd_teacher_url=URL), taught(opd_teacher_load=load, temperature=0.7)):
        assert list(check_teacher(right)) == [] == list(check_algorithm(right))  # of one sample a prompt, too
    assert list(check_teacher(taught(opd_teacher_url=URL, opd_type="vllm"))) == []
    assert list(check_teacher(replace(Config(), teacher=TeacherConfig(opd_teacher_url="?")))) == []  # said as unread


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (taught(), "--use-opd needs a teacher"),
        (taught(opd_teacher_url=URL, opd_type="megatron"), "--opd-type is megatron, which needs --opd-teacher-load"),
        (taught(opd_teacher_url="127.0.0.1:8100"), "--opd-teacher-url is '127.0.0.1:8100', but must be an address"),
        (taught(opd_teacher_url="http://a:b@c"), "--opd-teacher-url holds a user name or password"),
        (taught(opd_teacher_url=URL + "/v1?a=b"), "--opd-teacher-url is 'http://127.0.0.1:8100/v1?a=b', behind which"),
        (taught(opd_teacher_url=URL, coef=0.0), "--use-opd with --opd-kl-coef 0"),
        (taught(opd_teacher_url=URL, temperature=0.7), "--rollout-temperature is 0.7, but a vLLM server"),
        (taught(opd_teacher_url=URL, opd_teacher_key_file="/nowhere"), "--opd-teacher-key-file: /nowhere is not a"),
        (taught(opd_teacher_load="/nowhere"), "--opd-teacher-load /nowhere holds no config.json"),
    ],
)
def test_what_does_not_fit_is_named(config: Config, words: str) -> None:
    (problem,) = check_teacher(config)
    assert problem.startswith(words)


def test_settings_of_a_teacher_that_nobody_asks_are_named() -> None:
    def unread(config: Config, *names: str) -> list[str]:
        return [problem.split()[0] for problem in unread_settings(config, names)]

    names = ("teacher.opd_teacher_url", "teacher.opd_teacher_timeout_s", "algo.opd_kl_coef")
    assert len(unread(Config(), *names)) == 3
    assert unread(taught(opd_teacher_url=URL), *names) == []
    assert unread(taught(opd_teacher_load="x"), *names[1:]) == ["--opd-teacher-timeout-s"]


def test_older_weights_are_kept_only_where_rollouts_may_be_older() -> None:
    kept = Config(algo=AlgoConfig(keep_old_actor=True), rollout=RolloutConfig(num_rollout=4))
    (problem,) = check_old_actor(kept, overlapped=False)
    assert "there are no older ones to keep" in problem
    assert list(check_old_actor(kept, overlapped=True)) == []
    assert list(check_old_actor(replace(kept, sync=SyncConfig(update_weights_interval=2)), overlapped=False)) == []
    rows = replace(kept.rollout, custom_convert_samples_to_train_data_path="a.b")
    (problem,) = check_old_actor(replace(kept, rollout=rows), overlapped=True)
    assert problem.startswith("--keep-old-actor goes by the version of each token")
