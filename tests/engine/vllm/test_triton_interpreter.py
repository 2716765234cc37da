"""Triton's interpreter in the processes of an engine that returns routed experts on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.engine.vllm import triton_interpreter
from vime.engine.vllm.processes import import_path
from vime.engine.vllm.server import EngineServer
from vime.engine.vllm.versions import KNOWN
from vime.platform.cpu import CpuPlatform

# What vLLM's own kernels are: compiled where there is a backend, interpreted here.
_PROGRAM = """
import torch
from triton.backends import backends
assert "cpu" not in backends, "Triton has a backend for CPUs: the interpreter is not needed any more"
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.platforms import current_platform
assert HAS_TRITON and current_platform.is_cpu() and "cpu" in backends

@triton.jit
def double(source, target, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(target + at, 2 * tl.load(source + at))

numbers = torch.arange(8.0)
doubled = torch.zeros(8)
double[(1,)](numbers, doubled, n=8)
assert doubled.tolist() == [2.0 * i for i in range(8)]
"""


def test_vllm_finds_triton_on_a_cpu_by_a_plug_in_of_the_engines_folder(tmp_path: Path) -> None:
    environment = {**os.environ, **CpuPlatform().engine_environment(routed_experts=True)}
    environment["PYTHONPATH"] = import_path(environment)
    triton_interpreter.announce(tmp_path, environment)
    program = tmp_path / "program.py"  # Triton reads the source of its kernels
    program.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def server(tmp_path: Path, minor: int, *, routed_experts: bool) -> EngineServer:
    return EngineServer(
        "/models/tiny",
        arguments={},
        environment=CpuPlatform().engine_environment(routed_experts=routed_experts),
        key="run-key",
        log_path=tmp_path / "engine.log",
        routed_experts=routed_experts,
        adapter=KNOWN[0, minor],
    )


def test_an_engine_returns_routed_experts_on_demand_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    flag, variable = "--enable-return-routed-experts", "VLLM_USE_V2_MODEL_RUNNER"
    new, old, plain = (
        server(tmp_path, minor, routed_experts=on) for minor, on in ((32, True), (26, True), (32, False))
    )
    assert flag in new.command(1) and flag in old.command(1) and flag not in plain.command(1)
    assert new.child_environment()[variable] == "1"
    assert variable not in old.child_environment() and variable not in plain.child_environment()
    assert triton_interpreter.is_wanted(new.child_environment())
    assert not triton_interpreter.is_wanted(plain.child_environment())


def test_plug_ins_that_a_user_allows_keep_their_place(tmp_path: Path) -> None:
    environment = {"VLLM_PLUGINS": "theirs", "PYTHONPATH": "/theirs"}
    triton_interpreter.announce(tmp_path, environment)
    assert environment["VLLM_PLUGINS"].split(",")[0] == "theirs" and len(environment["VLLM_PLUGINS"].split(",")) == 2
    assert environment["PYTHONPATH"] == f"/theirs{os.pathsep}{tmp_path}"
