"""Graders that misbehave, for the pool's tests; workers load them by dotted path."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from vime.rewards import Grade

_hoard: list[bytes] = []


def _talk() -> None:
    time.sleep(0.05)
    for fd in range(3, 64):
        try:
            os.write(fd, b"late\n")
        except OSError:
            continue


def _is_read(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(file.read(1)) or path.endswith("mem")
    except OSError:
        return False


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
    """Does what the response says; an unknown word is graded 1."""
    if response == "hang":
        time.sleep(3600)
    if response == "meet":
        open(os.path.join(label, str(os.getpid())), "w").close()
        while len(os.listdir(label)) < 2:
            time.sleep(0.01)
    if response == "hang with a child":
        child = subprocess.Popen(["sleep", "3600"])
        with open(label, "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    if response == "hang with a runaway child":
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        with open(label, "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    if response == "leave a child":
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        with open(label, "w") as file:
            file.write(str(child.pid))
    if response == "leave a thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    if response == "leave a talker":
        threading.Thread(target=_talk, daemon=True).start()
    if response == "spy":
        return Grade(float(_is_read(f"/proc/{os.getppid()}/environ") or _is_read(f"/proc/{os.getppid()}/mem")), "wrong")
    if response == "spy with a program":
        done = subprocess.run(["cat", f"/proc/{os.getppid()}/environ"], capture_output=True)
        return Grade(float(bool(done.stdout)), "wrong")
    if response == "kill":
        os.kill(os.getppid(), 0)  # whether it might
    if response == "fork":
        if os.fork() == 0:
            return Grade(0.5, "wrong")  # a second process answers, too
        time.sleep(0.1)
    if response == "hoard":
        _hoard.append(bytes(150 << 20))
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
