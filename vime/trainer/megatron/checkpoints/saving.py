"""A checkpoint that is written while training goes on: copied at once, written by a thread, whole when all ranks are.

The files are those of megatron-core's `dist_checkpointing`, which plans them here, too. Its own asynchronous writers
are not used: they are processes forked from a trainer full of threads, need a manager process (seconds for the
smallest save), and live on when the trainer is killed, writing into a folder that the next run has taken over. A
thread ends with its trainer, and torch writes tensors without holding Python's lock.
"""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from vime.errors import TrainingError
from vime.trainer.megatron.checkpoints.shard_file import ShardFile

_log = logging.getLogger(__name__)


class Save:
    """One checkpoint being written, on one rank. Collective: build it on all ranks, then `end` it on all.

    Args:
        state: what `dist_checkpointing.save` takes.
        path: the folder to be; it has this name only when it is whole.
        in_background: the state may change as soon as this object is built. Costs a copy of it in the host's memory.
        fresh_prefix: tensors with keys that begin so are copies already, and are not copied again.
    Raises: TrainingError if the folder cannot be made.
    """

    def __init__(
        self, state: dict[str, Any], path: Path, *, in_background: bool, fresh_prefix: tuple[str, ...] = ()
    ) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._make_folder()
        self._strategy = _Strategy(copies=in_background, fresh_prefix=fresh_prefix)
        self._request = dist_checkpointing.save(
            state, str(self._partial), sharded_strategy=self._strategy, async_sharded_save=True
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="vime-save", daemon=True) if in_background else None
        if self._thread is None:
            self._write()
        else:
            self._thread.start()

    def _make_folder(self) -> None:
        """By rank 0, which tells the others if it cannot: they would wait for it. Raises: TrainingError, on each."""
        reason: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir(parents=True)
            except OSError as error:
                reason = [_words(error)]
        dist.broadcast_object_list(reason)
        if reason[0] is not None:
            raise TrainingError(f"the checkpoint {self._path} cannot be written: rank 0: {reason[0]}")

    def _write(self) -> None:
        try:
            self._strategy.writer.write()
        except Exception as error:
            self._error = error  # said by `end`, on all ranks

    def end(self, *, wait: bool) -> bool:
        """Give the checkpoint its name if every rank has written its part. Collective.

        Args: wait: until they have.
        Returns: whether it is done.
        Raises: TrainingError naming the ranks that could not write, and why.
        """
        if not wait and not self._all_have_written():
            return False
        if self._thread is not None:
            self._thread.join()
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, None if self._error is None else _words(self._error))
        if problems := [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]:
            raise TrainingError(f"the checkpoint {self._path} cannot be written: {'; '.join(problems)}")
        for finish in self._request.finalize_fns:
            finish()
        if dist.get_rank() == 0:
            if self._path.exists():
                shutil.rmtree(self._path)
            self._partial.rename(self._path)
        dist.barrier()
        return True

    def _all_have_written(self) -> bool:
        writing = self._thread is not None and self._thread.is_alive()
        count = torch.tensor([int(writing)], device=torch.cuda.current_device())
        dist.all_reduce(count)
        return not count.item()

    def abandon(self) -> None:
        """Write no further; what there is stays under its hidden name. Not collective."""
        self._strategy.writer.stops.set()
        if self._thread is not None:
            self._thread.join()


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else repr(error)


class _Strategy(mcore_torch.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's plan of who writes what, with our writer."""

    writer: _Writer

    def __init__(self, *, copies: bool, fresh_prefix: tuple[str, ...]) -> None:
        super().__init__("torch_dist", 1)
        self._copies, self._fresh_prefix = copies, fresh_prefix

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Copy, plan, and leave the writing to `self.writer`."""
        if self._copies:
            self._copy(sharded_state_dict)
        by_key, _, _ = mcore_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = mcore_torch.mcore_to_pyt_state_dict(by_key)
        self.writer = _Writer(Path(checkpoint_dir))
        planner = mcore_torch.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        to_finish, *_ = save_state_dict_async_plan(state, self.writer, None, 0, planner=planner)
        return AsyncRequest(self.writer.write, (), [lambda: save_state_dict_async_finalize(*to_finish)])

    def _copy(self, state: Any) -> None:
        """Give each tensor that this rank writes storage that nothing else will change."""
        for entry in nested_values(state):
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
                entry.data = _copy_of(entry.data, is_fresh=entry.key.startswith(self._fresh_prefix))
        torch.cuda.synchronize()


def _copy_of(tensor: Tensor, *, is_fresh: bool) -> Tensor:
    """On the host; from a device through pinned memory, complete after a synchronisation."""
    if tensor.device.type != "cpu":
        return tensor.detach().to("cpu", non_blocking=True)
    return tensor if is_fresh else tensor.detach().clone()


class _Writer(FileSystemWriter):
    """torch's layout of a checkpoint; the items go through a `ShardFile`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.stops = threading.Event()
        self._folder, self._results = folder, list[WriteResult]()

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called by the planning with this rank's items."""
        self._plan, self._planner = plan, planner

    def write(self) -> None:
        """This rank's part. Raises: OSError if there is no room."""
        if not self._plan.items:
            return
        with ShardFile(self._folder, dist.get_rank()) as file:
            for item in self._plan.items:
                if self.stops.is_set():
                    raise TrainingError("abandoned")
                file.add(item.index, self._planner.resolve_data(item))
            self._results = file.results

    def retrieve_write_results(self) -> list[WriteResult]:
        """Called when all ranks have written."""
        return self._results
