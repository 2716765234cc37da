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

from vime.config.hf_weights import INDEX, read_json_object, read_weights
from vime.errors import ConfigError
from vime.models import ModelSettings, NameMap, Names
from vime.models.stored import checked_weights
from vime.trainer.megatron.weights import shards
from vime.trainer.megatron.weights.safetensors_io import SafetensorsFolder

MAX_SHARD_BYTES = 5 << 30


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises: ConfigError if there is none, or it is no JSON object."""
    return read_json_object(folder / "config.json")


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], folder: Path, names: NameMap, model: ModelSettings) -> None:
    """Fill this rank's part of a Megatron model from safetensors, one tensor in memory at a time.

    A padded vocabulary's extra rows become zero.

    Args: chunks: the rank's, one for each of its pipeline stages.
    Raises: ConfigError naming the tensors that are missing, unexpected or of another shape.
    """
    files = {name: tensor.file for name, tensor in checked_weights(folder, names, model).items()}
    problems = []
    with ExitStack() as stack:
        opened = {f: stack.enter_context(safe_open(f, framework="pt")) for f in sorted(set(files.values()))}
        for name, parameter in shards.named_parameters(chunks, tied=model.tie_word_embeddings):
            entry = shards.own_names(names.to_hf(name))
            stored = [opened[files[n]].get_slice(n) for n in entry.hf]
            cut = shards.cut_of(parameter, entry.kind)
            if name in shards.VOCABULARY and stored[0].get_shape()[0] == model.vocab_size:
                first = cut.index * len(parameter) if cut is not None else 0
                rows = stored[0][first : first + len(parameter)]
                parameter[len(rows) :] = 0
                parameter[: len(rows)] = rows.to(parameter)
                continue
            if problem := _fill(parameter, (_own_cut(s, cut) for s in stored), entry, model):
                shapes = [tuple(s.get_shape()) for s in stored[:3]]
                problems.append(f"{entry.hf[:3]}: shapes {shapes}: {problem} {name}")
    if problems:
        raise ConfigError([f"{folder}: {p}" for p in problems])


def _own_cut(stored: Any, cut: shards.Cut | None) -> Tensor:
    """This rank's part of a tensor in a file; the rest is not read."""
    if cut is None:
        whole: Tensor = stored[:]
        return whole
    # A size that does not divide leaves rows over, and so a shape that will be refused.
    size = stored.get_shape()[cut.dim] // cut.parts
    mine = slice(cut.index * size, (cut.index + 1) * size)
    part: Tensor = stored[mine] if cut.dim == 0 else stored[:, mine]
    return part


def _fill(parameter: Tensor, parts: Iterator[Tensor], entry: Names, model: ModelSettings) -> str | None:
    """Copy HF tensors into a parameter; what is wrong with their shapes, or None."""
    if entry.kind in shards.OF_EXPERTS:  # one by one: they are many
        for part, place in zip(parts, shards.split(parameter, entry, model), strict=True):
            if part.shape != place.shape:
                return "does not fit"
            place.copy_(part)
        return None
    try:
        whole = shards.merge(list(parts), entry.kind, model)
    except (ValueError, RuntimeError) as error:
        return f"{error}, does not fit"
    if whole.shape != parameter.shape:
        return "does not fit"
    parameter.copy_(whole)
    return None


def kept_tensors(folder: Path, names: NameMap) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that are no part of the model, as they are: `export_hf` takes them behind its own."""
    kept = SafetensorsFolder({name: t for name, t in sorted(read_weights(folder).items()) if names.is_kept(name)})
    yield from ((name, kept.read(name)) for name in kept.names())


def export_hf(tensors: Iterator[tuple[str, Tensor]], source: Path, target: Path, *, dtype: torch.dtype) -> None:
    """Write an HF checkpoint: the source's config and tokenizer files, and the tensors as sharded safetensors.

    config.json comes last, so a folder that has one is whole; an earlier export there is replaced.

    Args:
        tensors: as `shards.hf_tensors` gives them, on rank 0, and `kept_tensors`.
        source: the checkpoint training started from.
        target: a folder, made if need be.
        dtype: the weights' dtype, noted in config.json.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in (target / "config.json", target / INDEX, *target.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    _write_shards(tensors, target)
    copy_other_files(source, target, dtype=dtype)


def copy_other_files(source: Path, target: Path, *, dtype: torch.dtype) -> None:
    """A checkpoint's tokenizer and other files that are not weights, and config.json with the weights' dtype, last."""
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


def _write_shards(tensors: Iterator[tuple[str, Tensor]], target: Path) -> None:
    """Fill a shard, write it, start the next; named as transformers does once their number is known."""
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        path = target / f".shard-{len(written)}.partial"
        path.touch()
        mode = path.stat().st_mode  # as the umask has it; safetensors writes for the owner alone
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(mode)
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
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
