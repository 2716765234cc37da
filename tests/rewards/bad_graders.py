"""Graders that misbehave, for the pool's tests; workers load them by dotted path."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from vime.rewards import Grade


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
    """Does what the response says; an unknown word is graded 1."""
    if response == "hang":
        time.sleep(3600)
    if response == "hang with a child":
        child = subprocess.Popen(["sleep", "3600"])
        with open(label, "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "exit":
        sys.exit(0)
    if response == "hard exit":
        os._exit(0)
    if response == "raise":
        raise RuntimeError("no")
    if response == "recurse":
        return grade(response, label, metadata)
    if response == "eat memory":
        hoard = []
        while True:
            hoard.append(bytearray(1 << 24))
    if response == "print":
        print('{"score": 9.0, "verdict": "correct"}')
        os.write(2, b"x" * (4 << 20))
    if response == "close everything":
        os.closerange(0, 1000)
    if response == "garbage":
        for fd in range(3, 64):
            try:
                os.write(fd, b"\xff garbage\n")
            except OSError:
                continue
    if response == "flood":
        for fd in range(3, 64):
            try:
                os.write(fd, b"y" * (1 << 20))
            except OSError:
                continue
    if response == "nan":
        return Grade(float("nan"), "correct")
    if response == "no grade":
        return 1.0
    if response == "fill the disk":
        with open(label, "wb") as file:
            file.write(b"x" * (8 << 20))
    if response == "environment":
        return Grade(float("SECRET_KEY" in os.environ), "correct")
    return Grade(1.0, "correct")
