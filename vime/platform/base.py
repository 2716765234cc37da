"""The contract of a hardware platform: what differs between kinds of devices, and nothing else."""

from __future__ import annotations

from typing import Any, Protocol


class Platform(Protocol):
    """Chosen once at start (`vime.platform.get_platform`) and passed to whoever needs it."""

    name: str
    """As in --platform."""
    device_type: str
    """torch's device type: "cpu", "cuda"."""
    collective_backend: str
    """torch.distributed backend: "gloo", "nccl"."""
    ray_resource: str
    """Ray's resource name of one device: "CPU", "GPU"."""
    visible_devices_variable: str | None
    """Environment variable that narrows the devices of a process; None where there is none."""
    transports: tuple[str, ...]
    """Weight transports this platform can do, best first."""

    turns_problem: str | None
    """Why nothing can leave the device so that trainer and engines take turns on it; None where that can be."""

    engine_head_sizes: tuple[int, ...] | None
    """Numbers in an attention head that engines can work with; None where that is no question."""

    def device_count(self) -> int:
        """Devices on this node (on the CPU platform: processes worth starting)."""

    def total_memory_bytes(self) -> int:
        """Memory of one device."""

    def peak_tflops(self, dtype: str) -> float | None:
        """The most TFLOP/s one device does in dense matrix products; None where nobody knows. For MFU.

        Args: dtype: "float32", "bfloat16", "float16".
        """

    def missing(self) -> list[str]:
        """What this machine lacks to run vime here: one sentence each, with the remedy. Empty when all is there."""

    def engine_arguments(self, max_model_len: int, num_devices: int = 1) -> dict[str, Any]:
        """vLLM engine arguments (field names of AsyncEngineArgs) that are right for these devices.

        Args: max_model_len: tokens of prompt and response together. num_devices: of the engine.
        """

    def engine_environment(self, num_devices: int = 1, *, routed_experts: bool = False) -> dict[str, str]:
        """Environment variables of the process of an engine of so many devices.

        Args: routed_experts: it is to say which experts it routed tokens to.
        """

    def aligned_engine(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Engine arguments and environment variables with which engines compute as the trainer does with --aligned."""

    def trainer_environment(self, ranks_on_node: int, host: str) -> dict[str, str]:
        """Environment variables of a training rank's process (threads, allocator, network interface).

        Args: host: the address at which the other ranks reach this one.
        """
