"""HF checkpoints to training checkpoints and back, by one process, tensor by tensor: no model, no ranks, no device.

A training checkpoint is megatron-core's: layers that are all alike are one tensor each over all layers, those of models
with experts are tensors of their own; a gated MLP's gate comes before its up projection; pieces may be cut anyhow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vime.config.dtype import stored_dtype
from vime.errors import ConfigError
from vime.models import Kind, ModelSettings, NameMap, Names, family_of
from vime.models.stored import checked_weights
from vime.trainer.megatron.checkpoints.shard_file import ShardFile
from vime.trainer.megatron.checkpoints.stored_tensors import StoredTensors
from vime.trainer.megatron.weights import hf_io, shards
from vime.trainer.megatron.weights.safetensors_io import Outline, SafetensorsFolder, checksum, write_sharded

_NO_WEIGHTS = ("optimizer.", "critic.", "reference.")
"""How the keys of a training checkpoint begin that are no part of the policy's weights."""
_TRAINED = ("float32", "bfloat16")
_CHOOSE = "choose one with --dtype float32 or --dtype bfloat16"
_MOST_PROBLEMS = 8  # a wrong width makes nearly every tensor another


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    num_tensors: int
    """As HF counts them."""
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a Megatron tensor is in a checkpoint."""

    key: str
    lead: tuple[int, ...]
    """Its indices in the first dimensions of what has this key."""
    lead_shape: tuple[int, ...]


def _place(name: str, model: ModelSettings) -> _Place:
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if layer is None or "moe_layer_freq" in model.transformer:
        return _Place(name, (), ())
    return _Place(f"decoder.layers.{layer[2]}", (int(layer[1]),), (model.transformer["num_layers"],))


@torch.no_grad()
def to_training(source: Path, target: Path, *, dtype: torch.dtype | None = None) -> Converted:
    """Write an HF checkpoint's weights as a training checkpoint without optimizer, and compare it with the source.

    Args:
        target: a folder, made here.
        dtype: of the weights; None: the source's.
    Raises: ConfigError for what cannot be trained, or does not fit together; OSError when the disk is full.
    """
    model, names = _model_of(source)
    must_be = None
    if dtype is None:
        must_be = stored_dtype(hf_io.read_config(source))
        if must_be not in _TRAINED:
            raise ConfigError(f"{source}: its dtype is {must_be}, which is not trained in; {_CHOOSE}")
        dtype = getattr(torch, must_be)
    stored = SafetensorsFolder(checked_weights(source, names, model, dtype=must_be, remedy=_CHOOSE, reads_head=True))
    target.mkdir(parents=True)
    entries: dict[str, TensorStorageMetadata] = {}
    wanted: dict[str, int] = {}
    num_bytes = 0
    with ShardFile(target, 0) as file:
        for name in names.megatron_names():
            place = _place(name, model)
            kept = torch.float32 if name.endswith(shards.KEPT_IN_FLOAT32) else dtype
            for offsets, shape, piece in _pieces(names.to_hf(name), stored, model, kept, wanted):
                offsets, shape = (*place.lead, *offsets), (*place.lead_shape, *shape)
                piece = piece.reshape((1,) * len(place.lead) + piece.shape)
                entry = entries.setdefault(
                    place.key, TensorStorageMetadata(TensorProperties(dtype=kept), torch.Size(shape), [])
                )
                if entry.size != torch.Size(shape):
                    raise ConfigError(f"{source}: {name} is {shape}, and {tuple(entry.size)} in another layer")
                entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.shape))
                file.add(MetadataIndex(place.key, torch.Size(offsets)), piece)
                num_bytes += piece.numel() * piece.element_size()
    metadata: dict[str, Any] = dict(entries)
    FileSystemWriter(target, sync_files=True).finish(Metadata(metadata), [file.results])
    torch.save({"counters": {"step": 0}}, target / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(target))
    written = StoredTensors(target)
    _check_stored(written, names, model, target)
    found = {name: checksum(tensor) for name, tensor in _hf_tensors(written, names, model)}
    _compare(found, wanted, target)
    return Converted(len(wanted), num_bytes, dtype)


def _pieces(
    entry: Names, stored: SafetensorsFolder, model: ModelSettings, dtype: torch.dtype, checksums: dict[str, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """(offsets, shape of the whole, piece) of a Megatron tensor: experts come one by one."""

    def read(name: str) -> Tensor:
        tensor = stored.read(name).to(dtype)
        checksums[name] = checksum(tensor)
        return tensor

    per_expert = {Kind.EXPERTS: 1, Kind.EXPERTS_GLU: 2}.get(entry.kind)
    if per_expert is None:
        try:
            whole = shards.merge([read(name) for name in entry.hf], entry.kind, model)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{entry.hf} do not fit together: {error}") from error
        yield (0,) * whole.dim(), tuple(whole.shape), whole
        return
    num_experts = len(entry.hf) // per_expert
    for e in range(num_experts):
        parts = [read(name) for name in entry.hf[e * per_expert : (e + 1) * per_expert]]
        piece = torch.stack(parts) if per_expert > 1 else parts[0]
        yield (e,) + (0,) * piece.dim(), (num_experts, *piece.shape), piece[None]


@torch.no_grad()
def to_hf(checkpoint: Path, source: Path, target: Path, *, dtype: torch.dtype | None = None) -> Converted:
    """Write a training checkpoint's weights as an HF checkpoint, and read it again to compare.

    Args:
        checkpoint: the trainer's part of one.
        source: the HF checkpoint training started from: config, tokenizer, and tensors that are not trained.
        target: a folder, made here.
        dtype: of the weights; None: as they are stored.
    Raises: ConfigError naming what does not fit the source; OSError when the disk is full.
    """
    model, names = _model_of(source)
    from_source = checked_weights(source, names, model, reads_head=True)
    stored = StoredTensors(checkpoint)
    _check_stored(stored, names, model, checkpoint)
    own = _outlines(stored, names, model, dtype)
    kept = SafetensorsFolder({name: from_source[name] for name in sorted(from_source) if names.is_kept(name)})
    outlines = [*own, *(kept.outline(name) for name in kept.names())]
    cast = {o.name: o.dtype for o in own}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor.to(cast[name])) for name, tensor in _hf_tensors(stored, names, model))
        yield from ((name, kept.read(name)) for name in kept.names())

    target.mkdir(parents=True)
    wanted = write_sharded(outlines, tensors(), target, max_shard_bytes=hf_io.MAX_SHARD_BYTES)
    main = dtype or stored.dtype(_place(names.megatron_names()[0], model).key)
    hf_io.copy_other_files(source, target, dtype=main)
    written = SafetensorsFolder(checked_weights(target, names, model))
    _compare({name: checksum(written.read(name)) for name in written.names()}, wanted, target)
    return Converted(len(outlines), sum(o.num_bytes for o in outlines), main)


def _model_of(source: Path) -> tuple[ModelSettings, NameMap]:
    hf = hf_io.read_config(source)
    family = family_of(hf)
    model = family.settings(hf)
    return model, family.name_map(model)


def _check_stored(stored: StoredTensors, names: NameMap, model: ModelSettings, checkpoint: Path) -> None:
    """Raises: ConfigError if it is of another model: other tensors, shapes, or dtypes that no run writes."""
    expected: dict[str, tuple[int, ...]] = {}
    for name in names.megatron_names():
        place = _place(name, model)
        expected[place.key] = (*place.lead_shape, *_megatron_shape(names.to_hf(name), names.shapes()))
    found = {key for key in stored.keys() if not key.startswith(_NO_WEIGHTS)}
    problems = []
    if missing := sorted(expected.keys() - found):
        problems.append(f"{checkpoint} lacks {len(missing)} tensors of this model, among them {missing[:3]}")
    if others := sorted(found - expected.keys()):
        problems.append(f"{checkpoint} has {len(others)} tensors that this model has not, among them {others[:3]}")
    for key in sorted(found & expected.keys()):
        shape, want = stored.shape(key), expected[key]
        padded = key in shards.VOCABULARY and shape[1:] == want[1:] and shape[0] >= want[0]
        if shape != want and not padded:
            problems.append(f"{checkpoint}: {key} is {list(shape)}, and in this model {list(want)}")
        if stored.dtype(key) not in (torch.float32, torch.bfloat16, torch.float16):
            problems.append(f"{checkpoint}: {key} is {stored.dtype(key)}, which no weights are")
    if problems:
        raise ConfigError(problems[:_MOST_PROBLEMS])


def _megatron_shape(entry: Names, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Of a Megatron tensor, without padding. Args: shapes: of HF's tensors."""
    first = shapes[entry.hf[0]]
    if entry.kind is Kind.EXPERTS:
        return (len(entry.hf), *first)
    if entry.kind is Kind.EXPERTS_GLU:
        return (len(entry.hf) // 2, 2, *first)
    return (sum(shapes[name][0] for name in entry.hf), *first[1:])


def _outlines(stored: StoredTensors, names: NameMap, model: ModelSettings, dtype: torch.dtype | None) -> list[Outline]:
    """Of the HF tensors that `_hf_tensors` gives, in its order."""
    outlines = []
    for name in names.megatron_names():
        place, entry = _place(name, model), names.to_hf(name)
        shape = stored.shape(place.key)[len(place.lead) :]
        parts = shards.split(torch.empty(shape, device="meta"), entry, model)
        kept = stored.dtype(place.key) if dtype is None or name.endswith(shards.KEPT_IN_FLOAT32) else dtype
        for hf_name, part in zip(entry.hf, parts, strict=True):
            rows = (model.vocab_size, *part.shape[1:]) if name in shards.VOCABULARY else tuple(part.shape)
            outlines.append(Outline(hf_name, rows, kept))
    return outlines


def _hf_tensors(stored: StoredTensors, names: NameMap, model: ModelSettings) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of a training checkpoint; no more than one Megatron tensor is in memory."""
    for name in names.megatron_names():
        place, entry = _place(name, model), names.to_hf(name)
        whole = stored.read(place.key, place.lead)
        for hf_name, part in zip(entry.hf, shards.split(whole, entry, model), strict=True):
            yield hf_name, part[: model.vocab_size] if name in shards.VOCABULARY else part


def _compare(found: dict[str, int], wanted: dict[str, int], target: Path) -> None:
    """Raises: OSError if what lies on the disk is not what was written."""
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if differing:
        raise OSError(f"{target}: {len(differing)} tensors came back other than written, among them {differing[:3]}")
