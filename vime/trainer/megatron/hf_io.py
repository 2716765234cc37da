"""HF checkpoints into Megatron and out again, tensor by tensor, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vime.errors import ConfigError
from vime.models import Kind, ModelSettings, NameMap, Names

MAX_SHARD_BYTES = 5 << 30
_INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises: ConfigError if there is none, or it is not JSON."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the folder of an HF checkpoint") from error
    return config


@torch.no_grad()
def load_hf(module: torch.nn.Module, folder: Path, names: NameMap, model: ModelSettings) -> None:
    """Fill a Megatron model from safetensors, one tensor in memory at a time.

    A padded vocabulary's extra rows become zero.

    Raises: ConfigError naming the tensors that are missing, unexpected or of another shape.
    """
    files = _tensor_files(folder)
    problems = []
    expected = set(names.hf_names())
    # A tied checkpoint may repeat the embedding as its head, and old ones carry RoPE's frequencies.
    ignored = {"lm_head.weight"} if model.tie_word_embeddings else set()
    unexpected = sorted(n for n in set(files) - expected - ignored if not n.endswith("rotary_emb.inv_freq"))
    if missing := sorted(expected - set(files)):
        problems.append(f"{folder} lacks {len(missing)} tensors, among them {missing[:3]}")
    if unexpected:
        problems.append(f"{folder} has {len(unexpected)} tensors of no known place, among them {unexpected[:3]}")
    if problems:
        raise ConfigError(problems)
    with ExitStack() as stack:
        opened = {f: stack.enter_context(safe_open(f, framework="pt")) for f in sorted(set(files.values()))}
        for name, parameter in module.named_parameters():
            entry = names.to_hf(name)
            parts = [opened[files[n]].get_tensor(n) for n in entry.hf]
            whole = merge(parts, entry.kind, model)
            if name in _VOCABULARY and len(whole) == model.vocab_size:
                parameter[len(whole) :] = 0
                parameter[: len(whole)] = whole.to(parameter)
                continue
            if whole.shape != parameter.shape:
                problems.append(f"{entry.hf}: shape {[tuple(p.shape) for p in parts]} does not fit {name}")
                continue
            parameter.copy_(whole)
    if problems:
        raise ConfigError([f"{folder}: {p}" for p in problems])


@torch.no_grad()
def hf_tensors(module: torch.nn.Module, names: NameMap, model: ModelSettings) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of a Megatron model, in the name table's order; at most one is a copy at a time."""
    parameters = dict(module.named_parameters())
    for name in names.megatron_names():
        entry = names.to_hf(name)
        tensor = parameters[name].detach()
        if name in _VOCABULARY:
            tensor = tensor[: model.vocab_size]
        yield from zip(entry.hf, split(tensor, entry, model), strict=True)


def export_hf(tensors: Iterator[tuple[str, Tensor]], source: Path, target: Path, *, dtype: torch.dtype) -> None:
    """Write an HF checkpoint: the source's config and tokenizer files, and the tensors as sharded safetensors.

    config.json comes last, so a folder that has one is whole; an earlier export there is replaced.

    Args:
        tensors: as `hf_tensors` gives them.
        source: the checkpoint training started from.
        target: a folder, made if need be.
        dtype: the weights' dtype, noted in config.json.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in (target / "config.json", target / _INDEX, *target.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    _write_shards(tensors, target)
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
        # The last one marks folders that `vime init-model` may overwrite.
        ours = path.name in ("config.json", "vime_init_model.json") or path.name.endswith(".index.json")
        if path.is_file() and not weights and not ours:
            shutil.copyfile(path, target / path.name)
    config = read_config(source)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def merge(parts: Sequence[Tensor], kind: Kind, model: ModelSettings) -> Tensor:
    """HF tensors to one Megatron tensor."""
    if kind is Kind.PLAIN:
        return parts[0]
    if kind is Kind.GLU:
        return torch.cat(list(parts))
    groups, width = model.transformer["num_query_groups"], model.transformer["kv_channels"]
    by_group = [p.reshape(groups, -1, width, *p.shape[1:]) for p in parts]
    return torch.cat(by_group, 1).flatten(0, 2)


def split(tensor: Tensor, entry: Names, model: ModelSettings) -> Sequence[Tensor]:
    """One Megatron tensor to its HF tensors; the inverse of `merge`."""
    if entry.kind is Kind.PLAIN:
        return [tensor]
    if entry.kind is Kind.GLU:
        return tensor.chunk(2)
    t = model.transformer
    groups, width, per_group = (
        t["num_query_groups"],
        t["kv_channels"],
        t["num_attention_heads"] // t["num_query_groups"],
    )
    by_group = tensor.view(groups, per_group + 2, width, *tensor.shape[1:])
    return [part.flatten(0, 2) for part in torch.split(by_group, [per_group, 1, 1], 1)]


_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its safetensors file."""
    index = folder / _INDEX
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if lost := sorted({f for f in names.values() if not (folder / f).exists()}):
            raise ConfigError(f"{index} names files that are not there: {lost}")
        return {name: folder / file for name, file in names.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ConfigError(f"{folder} has neither model.safetensors nor {_INDEX}; other weight formats are not read")
    with safe_open(single, framework="pt") as f:
        return dict.fromkeys(f.keys(), single)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], target: Path) -> None:
    """Fill a shard, write it, start the next; named as transformers does once their number is known."""
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        path = target / f".shard-{len(written)}.partial"
        save_file(shard, path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > MAX_SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor.cpu().contiguous().clone()
        size += num_bytes
        total += num_bytes
    flush()
    if len(written) == 1:
        written[0][0].rename(target / "model.safetensors")
        return
    weight_map = {}
    for k, (path, names) in enumerate(written, start=1):
        file = f"model-{k:05d}-of-{len(written):05d}.safetensors"
        path.rename(target / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
