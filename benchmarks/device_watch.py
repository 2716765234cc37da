"""How much memory of a CUDA device is in use, by whom: NVML asked over and over beside what is measured."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

INTERVAL_S = 0.05
GONE = "gone"


def device_number() -> int:
    """NVML's number of the first device that CUDA_VISIBLE_DEVICES leaves."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def process_name(pid: int) -> str:
    """What a process calls itself now: vLLM's and Ray's say what they are, others get their program's name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return GONE
    return os.path.basename(words[0].decode(errors="replace").strip()) or "unnamed"


def used_bytes() -> int:
    """In use on the first device that is visible, by whatever process, now."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(device_number())).used)
    finally:
        pynvml.nvmlShutdown()


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
        self._peaks: dict[int, int] = {}
        self.before_bytes = 0
        """In use when it was entered."""
        self.peak_bytes = 0

    def used_bytes(self) -> int:
        """Now."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)

    def sample(self) -> None:
        """Look once."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
            if process.usedGpuMemory is None:
                continue
            if (name := process_name(process.pid)) != GONE:
                self._names[process.pid] = name  # the last one: processes rename themselves while they start
            self._peaks[process.pid] = max(self._peaks.get(process.pid, 0), int(process.usedGpuMemory))

    @property
    def peak_by_process(self) -> dict[str, int]:
        """Of each name, the most that one process had; empty where the driver tells none."""
        peaks: dict[str, int] = {}
        for pid, size in self._peaks.items():
            name = self._names.get(pid, GONE)
            peaks[name] = max(peaks.get(name, 0), size)
        return peaks

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
