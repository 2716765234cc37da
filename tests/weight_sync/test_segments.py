"""Files of shared memory: made under a lock, whoever sweeps meanwhile."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from vime.weight_sync import segments


def test_a_segment_that_a_sweep_took_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, []

    def sweep_first(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.append(0)
            swept[:] = segments.remove_stale_segments(tmp_path)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    path, file = segments.locked_file(tmp_path)
    assert len(swept) == 1 and path.name != swept[0]
    assert path.exists() and os.fstat(file).st_ino == path.stat().st_ino
    assert segments.remove_stale_segments(tmp_path) == []
    os.close(file)
    assert segments.remove_stale_segments(tmp_path) == [path.name]
