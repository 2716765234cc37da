"""Triton's kernels on a CPU, by Triton's own interpreter: what vLLM 0.32 needs there to return routed experts.

vLLM returns routed experts through its model runner V2 alone, whose kernels are Triton's, and Triton has no backend for
CPUs. Its interpreter runs kernels with numpy, about 40 tokens a second: enough for tests, and used for nothing else.

vLLM looks for Triton when it is imported, in the server as in worker processes; the one thing it runs before is
plug-ins of the group `vllm.platform_plugins`. Such an entry point is read from the metadata of a distribution anywhere
on the import path, so an engine's own folder gets one: it works from a checkout as from an installed package, and for
that engine alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "TRITON_INTERPRET"
"""Triton reads it when it is imported; 1 in an engine's environment asks for all of this."""
_PLUGIN = "vime_triton_interpreter"


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether an engine with this environment runs Triton's interpreter."""
    return environment.get(VARIABLE) == "1"


def announce(folder: Path, environment: dict[str, str]) -> None:
    """Have vLLM's processes call `platform_plugin` before they look for Triton.

    Args:
        folder: of the engine, for the metadata that names the plug-in.
        environment: of the engine; changed.
    """
    metadata = folder / f"{_PLUGIN}-1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 1\n", encoding="utf-8")
    entry = f"[vllm.platform_plugins]\n{_PLUGIN} = {__name__}:{platform_plugin.__name__}\n"
    (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(folder)]))
    if allowed := environment.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = f"{allowed},{_PLUGIN}"
    environment.pop("VLLM_TARGET_DEVICE", None)  # for building vLLM; where it says cpu, no plug-in is looked for


def platform_plugin() -> None:
    """Give Triton a backend named cpu, which vLLM looks for; it compiles nothing. Returns: that this is no platform."""
    import triton.runtime.driver
    from triton.backends import Backend, backends

    if "cpu" not in backends:
        backends["cpu"] = Backend(compiler=_Compiler, driver=_Driver)
        triton.runtime.driver.driver.set_active(_Driver())


class _Driver:
    """What Triton and vLLM ask a driver before the interpreter takes over."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


class _Compiler:
    """Never compiles; torch's compiler asks it for a hash."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"
