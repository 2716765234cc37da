"""The CUDA platform: trainer over NCCL, vLLM on NVIDIA devices.

Nothing here initialises CUDA: the driver and the Ray head ask for counts and memory, and a context they opened would
hold device memory for the whole run and forbid forking. The figures come from nvidia-smi.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Any

from vime.platform.machine import interface_of, is_loopback

_MIB = 1 << 20
# Part of nvidia-smi's name -> dense TFLOP/s in bf16 and fp16, from NVIDIA's data sheets; the first that fits counts.
_PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
)


class CudaPlatform:
    """Satisfies `vime.platform.base.Platform`."""

    name = "cuda"
    device_type = "cuda"
    collective_backend = "nccl"
    ray_resource = "GPU"
    visible_devices_variable: str | None = "CUDA_VISIBLE_DEVICES"
    turns_problem: str | None = None
    engine_head_sizes: tuple[int, ...] | None = None  # vLLM chooses among several kinds of attention
    transports: tuple[str, ...] = ("ipc", "nccl", "shm", "gloo", "disk")

    def device_count(self) -> int:
        """NVIDIA devices of this node that CUDA_VISIBLE_DEVICES leaves; 0 without a driver."""
        return len(_memories_bytes())

    def total_memory_bytes(self) -> int:
        """Memory of the smallest device; 0 where there is none."""
        return min(_memories_bytes(), default=0)

    def peak_tflops(self, dtype: str) -> float | None:
        """The vendor's figure for the first device in 16 bits, without sparsity; None for others."""
        names = _visible("name")
        if not names or dtype not in ("bfloat16", "float16"):
            return None
        return next((peak for name, peak in _PEAK_TFLOPS if name in names[0]), None)

    def missing(self) -> list[str]:
        """What this machine lacks."""
        problems = []
        if sys.platform != "linux":
            problems.append(f"this is {sys.platform}; vLLM with CUDA runs on Linux")
        if shutil.which("nvidia-smi") is None:
            problems.append("nvidia-smi was not found; install the NVIDIA driver, or use --platform cpu")
        elif not _memories_bytes():
            problems.append("nvidia-smi lists no device that CUDA_VISIBLE_DEVICES leaves visible")
        problems += [
            f"{module} cannot be imported from this environment; install vime[cuda]"
            for module in ("torch", "vllm")
            if importlib.util.find_spec(module) is None
        ]
        return problems

    def engine_arguments(self, max_model_len: int, num_devices: int = 1) -> dict[str, Any]:
        """CUDA graphs stay on; how much memory the engine takes is the user's to say."""
        arguments = {"max_model_len": max_model_len, "enable_prefix_caching": True}
        # Worker processes of the server's own: vLLM would look for Ray, and the server is no part of the run's.
        return arguments if num_devices == 1 else {**arguments, "distributed_executor_backend": "mp"}

    def engine_environment(self, num_devices: int = 1, *, routed_experts: bool = False) -> dict[str, str]:
        """Settings vLLM reads from its environment."""
        # FlashInfer compiles its sampler at first use, which needs a CUDA toolkit on the machine.
        return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}

    def aligned_engine(self) -> tuple[dict[str, Any], dict[str, str]]:
        """vLLM's kernels whose results do not depend on what else is in a batch."""
        return {}, {"VLLM_BATCH_INVARIANT": "1"}

    def trainer_environment(self, ranks_on_node: int, host: str) -> dict[str, str]:
        """Communication queues in order, as tensor parallelism expects; an allocator that does not fragment.

        NCCL and gloo start their connections on the interface that has the address; a user's own choice stays.
        """
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if not is_loopback(host):
            names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
            environment |= {name: interface_of(host) for name in names if name not in os.environ}
        return environment


def _memories_bytes() -> list[int]:
    """Total memory of each visible device."""
    return [int(memory) * _MIB for memory in _visible("memory.total")]


def _visible(field: str) -> list[str]:
    """A field of nvidia-smi's for each visible device.

    nvidia-smi itself ignores CUDA_VISIBLE_DEVICES, so the selection is made here.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu=index,uuid,{field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []  # a driver that does not answer serves no device; `missing` says so
    devices = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [value for index, uuid, value in devices if _is_visible(index, uuid, visible)]


def _is_visible(index: str, uuid: str, visible: str | None) -> bool:
    if visible is None:
        return True
    return any(index == entry or (entry and uuid.startswith(entry)) for entry in map(str.strip, visible.split(",")))
