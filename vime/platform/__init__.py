"""Kinds of hardware; `get_platform` chooses one once at start.

Further ones come from packages that register a zero-argument factory under the entry-point group "vime.platforms".
"""

from __future__ import annotations

from importlib.metadata import entry_points

from vime.errors import ConfigError
from vime.platform.base import Platform

ENTRY_POINT_GROUP = "vime.platforms"
_BUILT_IN = ("cpu", "cuda")


def get_platform(name: str) -> Platform:
    """The platform of that name; "auto" is cuda where an NVIDIA device is visible, cpu elsewhere.

    Raises: ConfigError if there is none of that name.
    """
    from vime.platform.cpu import CpuPlatform
    from vime.platform.cuda import CudaPlatform

    if name == "auto":
        name = "cuda" if CudaPlatform().device_count() else "cpu"
    if name == "cpu":
        return CpuPlatform()
    if name == "cuda":
        return CudaPlatform()
    registered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in registered:
        known = ", ".join(["auto", *_BUILT_IN, *sorted(registered)])
        raise ConfigError(f"--platform is {name!r}, which nobody registered; known: {known}")
    platform: Platform = registered[name].load()()
    return platform
