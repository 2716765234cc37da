"""A grader whose process is killed while it loads it, the first time."""

import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.rewards import Grade

_marker = Path(tempfile.gettempdir()) / "was-here"
if not _marker.exists():
    _marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Always right."""
    return Grade(1.0, "correct")
