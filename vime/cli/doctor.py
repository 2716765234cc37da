"""`vime doctor`: what this machine lacks to run vime."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """`vime doctor`. Returns: 0 when nothing is missing, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="vime doctor", description="Say what this machine lacks.", allow_abbrev=False)
    parser.add_argument("--platform", default="auto", help="auto, cpu, cuda, or one that an entry point registers")
    wanted = parser.parse_args(argv).platform

    from vime.platform import get_platform

    platform = get_platform(wanted)
    missing = platform.missing()
    for sentence in missing:
        print(f"- {sentence}")
    if not missing:
        print(f"{platform.name}: nothing is missing ({platform.device_count()} devices)")
    return 1 if missing else 0
