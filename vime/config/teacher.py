"""The settings of the teacher of on-policy distillation, a section beside those of `vime.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.schema import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """Who gives the log-probs that a student learns from; read with --use-opd alone."""

    opd_type: str | None = setting(
        None,
        "where the teacher runs: vllm, a server that is asked, or megatron, in the trainer; default: by what is given",
        choices=("vllm", "megatron"),
    )
    opd_teacher_load: str | None = setting(
        None, "HF checkpoint of a teacher in the trainer, of the policy's architecture; its weights stay in host memory"
    )
    opd_teacher_url: str | None = setting(
        None, "address of a vLLM server of the teacher, such as http://127.0.0.1:8000"
    )
    opd_teacher_model: str | None = setting(None, "name of the model there; default: the one it serves")
    opd_teacher_key_file: str | None = setting(None, "file (mode 0600) with the key of that server, where it wants one")
    opd_teacher_timeout_s: float = setting(300.0, "seconds it may take for one sample")
    opd_teacher_max_retries: int = setting(5, "further requests for a sample after a failure that may pass")
    opd_teacher_max_connections: int = setting(64, "requests to it at a time")
