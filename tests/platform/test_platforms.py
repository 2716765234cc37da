"""The contract every platform keeps, and what is particular to each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vime.platform
from vime.errors import ConfigError
from vime.platform import cpu, cuda, get_platform
from vime.platform.base import Platform

SMI = "0, GPU-aaaa, 143771\n1, GPU-bbbb, 81559\n"


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi lists two devices."""
    monkeypatch.setattr(cuda.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(cuda.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=SMI))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_platform_keeps_the_contract(name: str) -> None:
    platform: Platform = get_platform(name)
    assert platform.name == name
    assert platform.device_count() >= 0 and platform.total_memory_bytes() >= 0
    assert all(isinstance(problem, str) for problem in platform.missing())
    arguments = platform.engine_arguments(4096)
    assert arguments["max_model_len"] == 4096 and "dtype" not in arguments
    assert arguments["enable_prefix_caching"] is True and "gpu_memory_utilization" not in arguments
    for environment in (platform.engine_environment(), platform.trainer_environment(2, "127.0.0.1")):
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in environment.items())
    assert platform.turns_problem is None or platform.turns_problem.strip()
    assert set(platform.transports) <= {"ipc", "nccl", "shm", "gloo", "disk"}


def test_engine_arguments_are_vllms_own_names() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    for name in ("cpu", "cuda"):
        for argument in get_platform(name).engine_arguments(64):
            assert argument in AsyncEngineArgs.__dataclass_fields__


def test_heads_that_engines_take_on_a_cpu_are_those_of_vllms_attention() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(get_platform("cpu").engine_head_sizes or ()) == CPUAttentionBackend.get_supported_head_sizes()


def test_auto_is_cuda_where_a_device_is_visible(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_platform("auto").name == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert get_platform("auto").name == "cpu"


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0,1", 2), ("1", 1), ("GPU-bbbb", 1), ("GPU-b", 1), ("", 0), ("7", 0)]
)
def test_cuda_counts_what_is_visible(
    two_devices: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda.CudaPlatform().device_count() == count


def test_cuda_memory_is_that_of_the_smallest_device(two_devices: None) -> None:
    assert cuda.CudaPlatform().total_memory_bytes() == 81559 << 20


def test_a_driver_that_fails_is_named(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(cuda.subprocess, "run", fails)
    assert cuda.CudaPlatform().device_count() == 0
    assert any("lists no device" in problem for problem in cuda.CudaPlatform().missing())


def test_asking_a_platform_initialises_no_device_library() -> None:
    program = (
        "import sys; from vime.platform import get_platform; p = get_platform('auto'); p.device_count(); p.missing();"
        "get_platform('cuda').missing(); assert 'torch' not in sys.modules and 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    ("flags", "missing"), [("fpu sse4_2", True), ("fpu avx2", False), ("fpu avx512f avx512_bf16", False)]
)
def test_the_cpu_needs_avx2_or_avx512(
    flags: str, missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nprocessor\t: 1\nflags\t\t: other\n")
    monkeypatch.setattr(cpu, "Path", lambda path: info if path == "/proc/cpuinfo" else Path(path))
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    assert any("AVX2" in problem for problem in cpu.CpuPlatform().missing()) is missing


def test_another_system_or_too_little_memory_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu.CpuPlatform, "total_memory_bytes", lambda self: 2 << 30)
    problems = cpu.CpuPlatform().missing()
    assert any("aarch64" in problem and "Use a Linux machine" in problem for problem in problems)
    assert any("2.0 GiB" in problem for problem in problems)


def test_a_package_may_register_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="tpu", load=lambda: lambda: SimpleNamespace(name="tpu"))
    monkeypatch.setattr(vime.platform, "entry_points", lambda group: [point] if group == "vime.platforms" else [])
    assert get_platform("tpu").name == "tpu"
    with pytest.raises(ConfigError, match="'npu', which nobody registered; known: auto, cpu, cuda, tpu"):
        get_platform("npu")


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "float16", 756.0),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
    ],
)
def test_the_peak_is_the_data_sheets_or_nobodys(
    device: str, dtype: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(cuda.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=f"0, GPU-aaaa, {device}\n"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert get_platform("cuda").peak_tflops(dtype) == peak
    assert get_platform("cpu").peak_tflops(dtype) is None
