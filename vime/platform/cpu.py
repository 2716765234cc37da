"""The CPU platform: trainer over gloo, vLLM's CPU build. For laptops, tests and continuous integration."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil

from vime.platform.machine import interface_of

_GIB = 1 << 30
_MIN_MEMORY_BYTES = 6 * _GIB  # a tiny run: engine 2.4 GiB, trainer 1 GiB, Ray 1 GiB, driver 0.7 GiB
_MAX_NUM_SEQS = 256
_KV_CACHE_GIB = 1
ALIGNED = "vime_aligned"
"""Entry of vLLM's additional_config: the engine computes as the trainer does with --aligned."""


class CpuPlatform:
    """Satisfies `vime.platform.base.Platform`."""

    name = "cpu"
    device_type = "cpu"
    collective_backend = "gloo"
    ray_resource = "CPU"
    visible_devices_variable: str | None = None
    turns_problem: str | None = (
        "trainer and engines use the host's memory side by side, and there is nowhere else to go"
    )
    # vLLM's attention for CPUs, 0.26 and 0.32; of another size its kernel fails at the first request.
    engine_head_sizes: tuple[int, ...] | None = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
    transports: tuple[str, ...] = ("shm", "gloo", "disk")

    def device_count(self) -> int:
        """Cores this process may run on."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def total_memory_bytes(self) -> int:
        """Memory of this machine, or of its control group where that is less."""
        total = int(psutil.virtual_memory().total)
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text().strip() if limit.exists() else "max"
        return min(total, int(text)) if text.isdigit() else total

    def peak_tflops(self, dtype: str) -> float | None:
        """Nobody knows: it depends on the cores, their clock and their vector units."""
        return None

    def missing(self) -> list[str]:
        """What this machine lacks. vLLM's log-prob kernel would need a C++ compiler; see `engine_environment`."""
        problems = []
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
            problems.append(
                f"this is {sys.platform} on {platform.machine()}; vLLM's CPU build is for Linux on x86-64. "
                "Use a Linux machine or container, or --platform cuda"
            )
        elif not {"avx2", "avx512f"} & cpu_flags():
            problems.append("this processor has neither AVX2 nor AVX512, and vLLM's CPU build needs one of them")
        if shutil.which("lscpu") is None:
            problems.append("lscpu was not found, and vLLM's CPU build calls it; install util-linux")
        if self.total_memory_bytes() < _MIN_MEMORY_BYTES:
            problems.append(
                f"this machine has {self.total_memory_bytes() / _GIB:.1f} GiB of memory; "
                f"trainer and engine need {_MIN_MEMORY_BYTES // _GIB} GiB together"
            )
        problems += [
            f"{module} cannot be imported from this environment; install vime[cpu]"
            for module in ("torch", "vllm")
            if importlib.util.find_spec(module) is None
        ]
        return problems

    def engine_arguments(self, max_model_len: int, num_devices: int = 1) -> dict[str, Any]:
        """One process per engine, no compilation: start-up counts for more than speed here."""
        return {
            "max_model_len": max_model_len,
            "max_num_seqs": _MAX_NUM_SEQS,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            # A seeded request whose prompt is cut in two ends vLLM 0.32: it winds the generator back by an offset, and
            # the CPU's has none. Prompts wait for a step with room instead.
            "enable_chunked_prefill": False,
            # In the server's process: 20 s to the first answer; with worker processes 36 to 53 s.
            "distributed_executor_backend": "uni" if num_devices == 1 else "mp",
        }

    def engine_environment(self, num_devices: int = 1, *, routed_experts: bool = False) -> dict[str, str]:
        """Settings vLLM reads from its environment."""
        # vLLM wants a NUMA node for each worker process, to bind its threads there; most machines have one.
        unbound = {} if num_devices == 1 else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {
            **unbound,
            # vLLM's kernels for it are Triton's, which a CPU can only interpret (engine/vllm/triton_interpreter.py).
            **({"TRITON_INTERPRET": "1"} if routed_experts else {}),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),  # GiB; vLLM's default is nearly all memory
            # vLLM compiles a small function of its sampler: 20 to 30 s and a C++ compiler, for no gain that could be
            # measured (6,000 to 7,000 tokens/s either way with a tiny model on 2 cores).
            "TORCHDYNAMO_DISABLE": "1",
            # The API server and the engine share the process: threads that spin on every core starve it.
            "OMP_NUM_THREADS": str(max(1, self.device_count() // 2 // num_devices)),
        }

    def aligned_engine(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Norms, RoPE, activations by torch, as in the trainer; attention, linear layers by engine/vllm/aligned.py."""
        return {"compilation_config": {"custom_ops": ["none"]}, "additional_config": {ALIGNED: True}}, {}

    def trainer_environment(self, ranks_on_node: int, host: str) -> dict[str, str]:
        """The cores are shared out among the ranks of the node, which talk over the interface that has the address."""
        threads = max(1, self.device_count() // ranks_on_node)
        return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": interface_of(host)}


def cpu_flags() -> set[str]:
    """The instruction set extensions of the first processor; empty where Linux does not list them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return set()
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
