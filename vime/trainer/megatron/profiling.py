"""Profiles of a training rank: torch traces or an nsys range of chosen rollouts, and CUDA's memory history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from vime.config import DebugConfig

_MAX_MEMORY_EVENTS = 1_000_000


class Profiler:
    """One per rank, around each rollout's training. Files go into `folder`, the run's.

    With nothing asked for it does nothing. Memory is recorded from here on, so build it before the model.
    """

    def __init__(self, debug: DebugConfig, folder: Path, *, rank: int, device_type: str) -> None:
        self._debug, self._rank, self._device_type = debug, rank, device_type
        self._traces = folder / "profile"
        self._snapshots = Path(debug.memory_snapshot_dir or folder / "memory")
        self._is_mine = rank in debug.profile_ranks
        self._left = debug.memory_snapshot_num_steps if debug.record_memory_history and self._is_mine else 0
        if self._left:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """Training on one rollout: profiled if it is among the chosen."""
        try:
            with self._profiled(rollout_id):
                yield
        except torch.OutOfMemoryError:
            if self._left:
                self._write_snapshot(f"out_of_memory_rollout_{rollout_id:06d}")
            raise
        if self._left:
            self._left -= 1
            if not self._left:
                self._write_snapshot(f"rollout_{rollout_id:06d}")

    @contextmanager
    def _profiled(self, rollout_id: int) -> Iterator[None]:
        debug = self._debug
        chosen = debug.profile and self._is_mine and debug.profile_step_start <= rollout_id < debug.profile_step_end
        if not chosen:
            yield
        elif debug.use_pytorch_profiler:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device_type == "cuda" else [])]
            with profile(activities=activities, record_shapes=True) as trace:
                yield
            self._traces.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self._traces / f"rank_{self._rank}_rollout_{rollout_id:06d}.json.gz"))
        else:
            # What `nsys profile --capture-range=cudaProfilerApi` waits for.
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def _write_snapshot(self, name: str) -> None:
        self._snapshots.mkdir(parents=True, exist_ok=True)
        path = self._snapshots / f"rank_{self._rank}_{name}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        self._left = 0
