"""`vime doctor`: what this machine lacks to run vime."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil


def run(argv: Sequence[str]) -> int:
    """`vime doctor`. Returns: 0 when nothing is missing, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="vime doctor", description="Say what this machine lacks.", allow_abbrev=False)
    parser.add_argument("--platform", default="auto", help="auto, cpu, cuda, or one that an entry point registers")
    wanted = parser.parse_args(argv).platform

    from vime.observability.run_folder import versions
    from vime.platform import get_platform

    found = versions()
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version is not None)
    print(f"vime {found['vime']}, Python {found['python']}, {found['platform']}")
    print(packages)
    print(f"{found['num_cpus']} CPU cores ({found['cpu_model']}), {_free_space()}")
    platform = get_platform(wanted)
    missing = platform.missing()
    for sentence in missing:
        print(f"- {sentence}")
    if not missing:
        print(f"{platform.name}: nothing is missing ({platform.device_count()} devices)")
    return 1 if missing else 0


def _free_space() -> str:
    """Memory, shared memory (Ray and the weight sync live there) and the temporary folder, in GiB that are free."""
    memory = psutil.virtual_memory()
    parts = [f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free"]
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if place.is_dir():
            parts.append(f"{shutil.disk_usage(place).free / 2**30:.1f} GiB free in {place}")
    return ", ".join(parts)
