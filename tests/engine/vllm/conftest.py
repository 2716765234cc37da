"""One process that syncs several mixtures of experts; several tests look at what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_tiny_model
from vime.engine.vllm.processes import import_path
from vime.platform.cpu import CpuPlatform


@pytest.fixture(scope="session")
def moe_syncs(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `moe_syncs.py` found, by model."""
    root = tmp_path_factory.mktemp("moe")
    glm = save_tiny_model(root / "glm", "glm4_moe")
    half = save_tiny_model(root / "half", "qwen3_moe", dtype="bfloat16", norm_topk_prob=False)
    cases = [
        {"name": "qwen3_moe", "folder": str(tiny_qwen3_moe), "dtype": "float32", "wrong": True},
        {"name": "qwen3_moe_bf16", "folder": str(half), "dtype": "bfloat16"},
        {"name": "glm4_moe", "folder": str(glm), "dtype": "float32"},
        {"name": "drafter", "folder": str(glm), "dtype": "float32", "drafter": True},
    ]
    environment = {**os.environ, **CpuPlatform().engine_environment(), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = import_path(environment)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.vllm.moe_syncs", json.dumps(cases), str(root)],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result
