"""The engine's end of a weight sync, inside vLLM's worker processes.

vLLM imports this module for `WorkerExtension` (--worker-extension-cls) before it loads the model; importing it
registers the transfer backend "vime". A sync is: init_weight_transfer_engine (what will come) -> start_weight_update ->
update_weights, one bucket each -> finish_weight_update. From start to a good finish the worker is not fit to serve;
`vime_sync_state` says so to whoever wants to resume it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

import vime
from vime.engine.vllm import aligned, fixes
from vime.engine.vllm.partial_loads import partly_loaded
from vime.engine.vllm.weight_names import TRANSFER_BACKEND, WeightLedger, checkpoint_folder, checkpoint_names, listed
from vime.errors import WeightSyncError
from vime.platform.machine import shared_memory_id
from vime.wire import BucketMessage, view_tensors, wrong_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vime.protocols import BucketReader

TRANSPORTS = (
    "shm",
    "disk",
    "gloo",
    "nccl",
    "ipc",
)  # vime.weight_sync.<name>.Reader; a name from outside this tuple is never imported

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class SyncInit(WeightTransferInitInfo):
    """What a sync will bring."""

    version: int
    transport: str
    names: list[str] = field(default_factory=list)


@dataclass
class SyncUpdate(WeightTransferUpdateInfo):
    """One bucket; the message's own JSON form."""

    message: BucketMessage


class SyncEngine(WeightTransferEngine[SyncInit, SyncUpdate]):
    """Receives buckets, checks every tensor on this worker's device, and loads them layer by layer."""

    init_info_cls = SyncInit
    update_info_cls = SyncUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._readers: dict[str, BucketReader] = {}
        self._plan: SyncInit | None = None
        self._ledger: WeightLedger | None = None
        self._parameters: set[str] = set()
        self._loaded_parameters: set[str] = set()
        self.seconds = dict.fromkeys(("read", "check", "load"), 0.0)
        """Spent on the buckets of the last sync."""
        self.is_open = False
        self.broken: str | None = None
        """Why this worker's weights may not be used; None when they may."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> SyncUpdate:
        """The bucket message of an update request. Raises: ValueError on a malformed one."""
        try:
            return SyncUpdate(BucketMessage.from_json(update_dict))
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed bucket message: {error!r}") from error

    def init_transfer_engine(self, init_info: SyncInit) -> None:
        """Remember what will come. Called before every sync."""
        if init_info.transport not in TRANSPORTS:
            raise ValueError(f"unknown weight transport {init_info.transport!r}; known: {', '.join(TRANSPORTS)}")
        self._plan = init_info

    def start_weight_update(self) -> None:
        """Open the sync: from here until a good finish the weights may not be used."""
        if self._plan is None:
            raise WeightSyncError("start_weight_update came before init_weight_transfer_engine")
        self._ledger = WeightLedger(self._plan.names, self._required)
        if problem := self._ledger.announcement_problem():
            raise WeightSyncError(problem)
        self._loaded_parameters = set()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.broken = f"the sync to version {self._plan.version} has not ended"
        self.is_open = True
        with self._vllm_context():
            initialize_layerwise_reload(self.model)
        # Named as the checkpoint loader names them: layers restored for loading, before any repacking.
        self._parameters = {name for name, _ in self.model.named_parameters()}

    @cached_property
    def _required(self) -> frozenset[str] | None:
        """What every sync must bring: the names of the checkpoint that this engine started from, read once."""
        return checkpoint_names(self.model_config.model, self.model_config.hf_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; the writer may use its place again afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SyncUpdate) -> None:
        """Check the whole bucket, then load it. Raises: WeightSyncError naming tensors."""
        assert self._plan is not None and self._ledger is not None
        message = update_info.message
        try:
            if message.version != self._plan.version:
                raise WeightSyncError(
                    f"bucket {message.index} is of version {message.version}, the sync is to {self._plan.version}"
                )
            tensors = self._read(message)
            if problem := self._ledger.receive([name for name, _ in tensors]):
                raise WeightSyncError(f"bucket {message.index}: {problem}")
            with self._vllm_context(), self._timed("load"):
                loaded = self.model.load_weights(tensors)  # type: ignore[operator]
                if loaded is None:
                    raise WeightSyncError(f"{type(self.model).__name__}.load_weights does not say what it loaded")
                self._loaded_parameters |= loaded | self._load_tied_head(dict(tensors))
        except Exception as error:
            self.broken = str(error)
            raise

    def _load_tied_head(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Load the input embedding into an output head that is a layer of its own but tied to it (vLLM's Llama).

        The reload untied the two when it restored both layers for loading, and load_weights skips a tied head.
        Returns: the parameters loaded.
        """
        embedding = tensors.get(_EMBEDDING)
        if embedding is None or _HEAD not in self._parameters or not self.model_config.hf_config.tie_word_embeddings:
            return set()
        head: Any = self.model.get_parameter(_HEAD)
        head.weight_loader(head, embedding)
        return {_HEAD}

    def finish_weight_update(self) -> None:
        """Close the sync: every name came once, every parameter was loaded, whole. Raises: WeightSyncError."""
        assert self._ledger is not None
        try:
            if problem := self._ledger.completion_problem():
                raise WeightSyncError(problem)
            if untouched := sorted(self._parameters - self._loaded_parameters):
                raise WeightSyncError(f"vLLM parameters that no tensor was loaded into: {listed(untouched)}")
            if partly := partly_loaded(self.model):
                raise WeightSyncError(f"vLLM layers that the tensors filled only in part: {listed(partly)}")
            self._close()
        except Exception as error:
            self.broken = str(error)
            raise
        self.broken = None

    def abandon(self) -> None:
        """Drop an unfinished sync; the weights stay unfit for use until another one ends well."""
        if self.is_open:
            self._close()

    def shutdown(self) -> None:
        """Close the readers."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.26; vime's trainer sends through vime.weight_sync instead."""
        raise NotImplementedError("vime's weights are sent by vime.weight_sync")

    def _close(self) -> None:
        with self._vllm_context():
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        for reader in self._readers.values():
            reader.end_sync()
        self.is_open = False

    def _read(self, message: BucketMessage) -> list[tuple[str, torch.Tensor]]:
        """The bucket's tensors, copied to this worker's device, each with the checksum the trainer announced."""
        assert self._plan is not None
        with self._timed("read"):
            # The reload keeps a layer's tensors until the layer is complete, beyond this bucket's life: always a copy.
            data = self._reader(self._plan.transport).read(message, self.device)
        tensors = view_tensors(data, message)
        with self._timed("check"):
            wrong = wrong_tensors(data, message)
        if wrong:
            raise WeightSyncError(f"bucket {message.index}: the checksum differs for {listed(wrong)}")
        return tensors

    def _reader(self, transport: str) -> BucketReader:
        if transport not in self._readers:
            module = importlib.import_module(f"vime.weight_sync.{transport}")
            self._readers[transport] = module.Reader()
        return self._readers[transport]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds[part] += time.monotonic() - begin

    @contextmanager
    def _vllm_context(self) -> Iterator[None]:
        # 0.26 calls a transfer engine outside vLLM's current config, 0.32 inside; layers look it up while they repack.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield


class WorkerExtension:
    """Methods mixed into vLLM's worker class, called through /collective_rpc."""

    weight_transfer_engine: Any
    vllm_config: Any
    _weight_update_active: bool

    def vime_sync_state(self) -> dict[str, Any]:
        """{"broken": why the weights may not be used or None, "is_open": a sync is under way, "seconds": by part}."""
        engine: SyncEngine = self.weight_transfer_engine
        return {"broken": engine.broken, "is_open": engine.is_open, "seconds": dict(engine.seconds)}

    def vime_identity(self) -> dict[str, Any]:
        """What a trainer that did not start this engine must know of it."""
        model = self.vllm_config.model_config
        switch = getattr(self.vllm_config, "aux_output_config", model)  # 0.26: of the model
        return {
            "vime": vime.__version__,
            "config": json.loads((checkpoint_folder(model.model) / "config.json").read_text(encoding="utf-8")),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "max_logprobs": int(model.max_logprobs),
            "max_model_len": int(model.max_model_len),
            "shared_memory": shared_memory_id(),
            "routed_experts": bool(switch.enable_return_routed_experts),
            "device_type": self.vllm_config.device_config.device_type,
        }

    def vime_abandon_sync(self, reason: str) -> dict[str, Any]:
        """End an unfinished sync so that another can start; until then the weights may not be used."""
        engine: SyncEngine = self.weight_transfer_engine
        engine.abandon()
        engine.broken = reason
        engine.reset_weight_update_target()
        # vLLM leaves this set when finish_weight_update raises, and would then refuse every later sync.
        self._weight_update_active = False
        return self.vime_sync_state()


def register(registry: Mapping[str, Any]) -> None:
    """Add the backend to vLLM's factory, once per process."""
    if TRANSFER_BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, SyncEngine)


register(WeightTransferEngineFactory._registry)
fixes.apply()
if current_platform.is_cpu():
    aligned.install()
