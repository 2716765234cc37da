"""Checks of on-policy distillation and of the older policies that old log-probs come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.config import Config
from vime.config.modes import evaluates_only, generates, replays, trains
from vime.config.validate_cluster import key_file_problem
from vime.config.validate_reward import url_problem


def teacher_is_served(config: Config) -> bool:
    """Whether the teacher's log-probs come from a server."""
    return config.algo.use_opd and config.teacher.opd_teacher_load is None


def check_teacher(config: Config) -> Iterator[str]:
    """What is wrong with the settings of distillation."""
    algo, teacher = config.algo, config.teacher
    if not algo.use_opd or algo.loss_type == "sft_loss":
        return
    if algo.opd_kl_coef == 0:
        yield "--use-opd with --opd-kl-coef 0 asks a teacher for nothing; set a coefficient, or drop it"
    given = {"vllm": teacher.opd_teacher_url, "megatron": teacher.opd_teacher_load}
    kind = teacher.opd_type or next((kind for kind, value in given.items() if value), None)
    if all(given.values()):
        yield "--opd-teacher-url and --opd-teacher-load name two teachers; give one"
    elif kind is None:
        yield "--use-opd needs a teacher: --opd-teacher-url, a vLLM server, or --opd-teacher-load, an HF checkpoint"
    elif given[kind] is None:
        flag = "--opd-teacher-url" if kind == "vllm" else "--opd-teacher-load"
        yield f"--opd-type is {kind}, which needs {flag}; give it, or drop --opd-type"
    if teacher.opd_teacher_load is not None and not (Path(teacher.opd_teacher_load) / "config.json").is_file():
        yield f"--opd-teacher-load {teacher.opd_teacher_load} holds no config.json; it must be an HF checkpoint folder"
    if teacher.opd_teacher_url is not None:
        yield from _server(config, teacher.opd_teacher_url)


def _server(config: Config, url: str) -> Iterator[str]:
    if problem := url_problem(url):
        yield f"--opd-teacher-url {problem}"
    elif "?" in url or "#" in url:
        yield f"--opd-teacher-url is {url!r}, behind which paths such as /v1/completions are put; leave ? and # out"
    if (path := config.teacher.opd_teacher_key_file) is not None and (problem := key_file_problem(Path(path))):
        yield f"--opd-teacher-key-file: {problem}"
    if config.rollout.rollout_temperature != 1.0:
        yield (
            f"--rollout-temperature is {config.rollout.rollout_temperature}, but a vLLM server gives a prompt's "
            "log-probs at temperature 1; use 1, or a teacher in the trainer (--opd-teacher-load)"
        )
    if config.rollout.rollout_top_p != 1.0 or config.rollout.rollout_top_k != -1 or config.rollout.rollout_min_p:
        yield (
            "--rollout-top-p, --rollout-top-k and --rollout-min-p cut what the student samples from, but a vLLM server "
            "gives log-probs over the whole vocabulary; leave them out, or use a teacher in the trainer "
            "(--opd-teacher-load)"
        )
    if config.rollout.custom_convert_samples_to_train_data_path is not None:
        yield (
            "--custom-convert-samples-to-train-data-path makes rows of its own, for which a server's log-probs of "
            "samples are not known; use a teacher in the trainer (--opd-teacher-load)"
        )


def check_old_actor(config: Config, *, overlapped: bool) -> Iterator[str]:
    """Whether --keep-old-actor has anything to keep. Args: overlapped: train_async.py runs."""
    if not config.algo.keep_old_actor or config.algo.loss_type == "sft_loss" or evaluates_only(config):
        return
    if config.algo.use_rollout_logprobs:
        yield "--use-rollout-logprobs has the engine's log-probs as the old ones, --keep-old-actor others; drop one"
    if replays(config) or not (trains(config) and generates(config)):
        yield "--keep-old-actor keeps the weights that engines get, but no engines run; drop it"
    elif not overlapped and config.sync.update_weights_interval == 1:
        yield (
            "--keep-old-actor: engines have the trainer's own weights in every rollout of train.py, so there are no "
            "older ones to keep; drop it, or use train_async.py or --update-weights-interval above 1"
        )
    if config.rollout.custom_convert_samples_to_train_data_path is not None:
        yield (
            "--keep-old-actor goes by the version of each token, which rows of "
            "--custom-convert-samples-to-train-data-path do not have; drop one of the two"
        )
