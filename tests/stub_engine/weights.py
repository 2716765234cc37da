"""The stub's end of a weight sync: the same ledger, readers and checksums as the real one's, without vLLM."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vime.engine.vllm.weight_names import WeightLedger, checkpoint_names, listed
from vime.errors import WeightSyncError
from vime.wire import BucketMessage, view_tensors, wrong_tensors

if TYPE_CHECKING:
    import torch

TRANSPORTS = ("shm", "disk", "gloo")


class WeightReceiver:
    """One sync after another: init, start, update bucket by bucket, finish.

    Args: folder: the checkpoint that the engine was started from.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._required = checkpoint_names(str(folder), SimpleNamespace(**config))
        self._readers: dict[str, Any] = {}
        self._plan: dict[str, Any] | None = None
        self._ledger: WeightLedger | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self.seconds = dict.fromkeys(("read", "check", "load"), 0.0)
        self.is_open = False
        self.broken: str | None = None

    def state(self) -> dict[str, Any]:
        """As `WorkerExtension.vime_sync_state`."""
        return {"broken": self.broken, "is_open": self.is_open, "seconds": dict(self.seconds)}

    def init(self, info: dict[str, Any]) -> None:
        """What will come."""
        if info["transport"] not in TRANSPORTS:
            raise WeightSyncError(f"unknown weight transport {info['transport']!r}")
        self._plan = info

    def start(self) -> None:
        """Open the sync."""
        if self._plan is None:
            raise WeightSyncError("start_weight_update came before init_weight_transfer_engine")
        self._ledger = WeightLedger(self._plan["names"], self._required)
        if problem := self._ledger.announcement_problem():
            raise WeightSyncError(problem)
        self._tensors = {}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.broken = f"the sync to version {self._plan['version']} has not ended"
        self.is_open = True

    def update(self, info: Mapping[str, Any]) -> None:
        """One bucket."""
        if self._plan is None or self._ledger is None or not self.is_open:
            raise WeightSyncError("a bucket came before start_weight_update")
        message = BucketMessage.from_json(info)
        try:
            self._receive(message, self._plan, self._ledger)
        except Exception as error:
            self.broken = str(error)
            raise

    def _receive(self, message: BucketMessage, plan: Mapping[str, Any], ledger: WeightLedger) -> None:
        import torch

        if message.version != plan["version"]:
            raise WeightSyncError(f"bucket {message.index} is of version {message.version}, not {plan['version']}")
        transport = plan["transport"]
        if transport not in self._readers:
            self._readers[transport] = importlib.import_module(f"vime.weight_sync.{transport}").Reader()
        begin = time.monotonic()
        data = self._readers[transport].read(message, torch.device("cpu"))
        read = time.monotonic()
        tensors = view_tensors(data, message)
        if wrong := wrong_tensors(data, message):
            raise WeightSyncError(f"bucket {message.index}: the checksum differs for {listed(wrong)}")
        self.seconds["read"] += read - begin
        self.seconds["check"] += time.monotonic() - read
        if problem := ledger.receive([name for name, _ in tensors]):
            raise WeightSyncError(f"bucket {message.index}: {problem}")
        self._tensors |= {name: tensor.clone() for name, tensor in tensors}

    def finish(self) -> dict[str, torch.Tensor]:
        """Close the sync. Returns: the new weights by HF name."""
        if self._ledger is None:
            raise WeightSyncError("no sync is open")
        if problem := self._ledger.completion_problem():
            self.broken = problem
            raise WeightSyncError(problem)
        self._close()
        self.broken = None
        return self._tensors

    def abandon(self, reason: str) -> None:
        """Drop an unfinished sync."""
        if self.is_open:
            self._close()
        self.broken = reason

    def _close(self) -> None:
        for reader in self._readers.values():
            reader.end_sync()
        self.is_open = False
