"""How much memory of a CUDA device is in use, by whom: NVML asked over and over beside what is measured."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

INTERVAL_S = 0.05


def device_number() -> int:
    """NVML's number of the first device that CUDA_VISIBLE_DEVICES leaves."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def process_name(pid: int) -> str:
    """What a process calls itself now: vLLM's and Ray's say what they are, others get their program's name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return os.path.basename(words[0].decode(errors="replace").strip()) or "unnamed"


class DeviceWatch:
    """While it is entered, keeps the most that was in use on a device, in all and by each process.

    Args:
        number: NVML's number of the device.
        nvml: the module `pynvml`; imported when None.
    """

    def __init__(self, number: int | None = None, nvml: Any = None) -> None:
        if nvml is None:
            import pynvml as nvml
        self._nvml, self._number = nvml, device_number() if number is None else number
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device-watch", daemon=True)
        self._names: dict[int, str] = {}
        self.before_bytes = 0
        """In use when it was entered."""
        self.peak_bytes = 0
        self.peak_by_process: dict[str, int] = {}
        """Of each name, the most that one process had; empty where the driver tells none."""

    def used_bytes(self) -> int:
        """Now."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)

    def sample(self) -> None:
        """Look once."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
            if process.usedGpuMemory is None:
                continue
            name = process_name(process.pid)
            # A process renames itself while it starts; what it had before belongs to the name it has at last.
            if (old := self._names.get(process.pid)) not in (None, name) and name != "gone":
                self.peak_by_process.pop(str(old), None)
            if name == "gone":
                name = self._names.get(process.pid, name)
            self._names[process.pid] = name
            self.peak_by_process[name] = max(self.peak_by_process.get(name, 0), int(process.usedGpuMemory))

    def engine_bytes(self) -> int | None:
        """The most that a vLLM engine in a process of its own had; None where the driver does not tell."""
        sizes = [size for name, size in self.peak_by_process.items() if "enginecore" in name.lower()]
        return max(sizes, default=None)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.sample()

    def __enter__(self) -> DeviceWatch:
        self._nvml.nvmlInit()
        self._device = self._nvml.nvmlDeviceGetHandleByIndex(self._number)
        self.before_bytes = self.used_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._nvml.nvmlShutdown()
