"""Which rank holds which part of which tensor, and tensors put together from their parts.

Tensor-parallel ranks hold equal cuts of most tensors; pipeline stages hold some layers each; context- and data-parallel
ranks hold copies. Experts are divided among a stage's ranks in a way of their own. What is gathered goes to rank 0, HF
tensor by HF tensor, so that no rank ever holds a whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from vime.models import Kind, ModelSettings, NameMap, Names
from vime.trainer.megatron import parallel

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose rows are tokens, and may be padded."""
KEPT_IN_FLOAT32 = ".router.expert_bias"
"""How tensors end that no change of dtype touches."""
OF_EXPERTS = (Kind.EXPERTS, Kind.EXPERTS_GLU)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a Megatron tensor lives, and the HF tensors it makes."""

    stage: int
    cut: Cut | None
    """How this and other ranks cut each of its HF tensors; None: all have the whole."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its HF tensors, whole."""
    dtype: torch.dtype
    holders: tuple[tuple[int, ...], ...] = ()
    """Of experts: for each expert-parallel rank, the ranks that hold the cuts of its experts."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One of equal parts of a tensor."""

    dim: int
    index: int
    parts: int


def named_parameters(chunks: Sequence[torch.nn.Module], *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters by the name they have in the whole model, layers counted over all stages.

    The last of several stages has a copy of a tied embedding as its head; it comes under the embedding's name. Routers'
    expert biases, which the optimizer does not know, are among them.
    """
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        biases = ((n, b) for n, b in chunk.named_buffers() if n.endswith(KEPT_IN_FLOAT32))
        for name, tensor in (*chunk.named_parameters(), *biases):
            if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
                name = f"decoder.layers.{numbers[int(layer[1])]}.{name[layer.end() :]}"
            yield VOCABULARY[0] if tied and name == VOCABULARY[1] else name, tensor


def cut_of(parameter: Tensor, kind: Kind) -> Cut | None:
    """Which part of its HF tensors a parameter has on this rank; None: all of them whole."""
    if kind in OF_EXPERTS:
        (_, _, index), parts = parallel.expert_place(), parallel.etp_size()
        dim = 0 if kind is Kind.EXPERTS_GLU else 1  # of an expert's matrix, as HF keeps it
        return Cut(dim, index, parts) if parts > 1 else None
    if parallel.tp_size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    assert kind is Kind.PLAIN or dim == 0, f"a {kind} tensor cut along {dim}"
    return Cut(dim, parallel.tp_rank(), parallel.tp_size())


def own_names(entry: Names) -> Names:
    """The HF tensors of which this rank has something: all, or those of its experts."""
    if entry.kind not in OF_EXPERTS:
        return entry
    _, index, _ = parallel.expert_place()
    count = len(entry.hf) // parallel.ep_size()
    return replace(entry, hf=entry.hf[index * count : (index + 1) * count])


def homes(chunks: Sequence[torch.nn.Module], names: NameMap, model: ModelSettings) -> dict[str, Home]:
    """The home of every Megatron tensor of the whole model. Collective."""
    mine = {}
    holders = _holders_of_experts()
    for name, parameter in named_parameters(chunks, tied=model.tie_word_embeddings):
        entry = names.to_hf(name)
        cut = cut_of(parameter, entry.kind)
        shapes = [list(part.shape) for part in split(parameter.detach(), entry, model)]
        for shape in shapes:
            if cut is not None:
                shape[cut.dim] *= cut.parts
            if name in VOCABULARY:
                shape[0] = model.vocab_size
        of_experts = entry.kind in OF_EXPERTS
        mine[name] = Home(
            parallel.pp_rank(),
            cut,
            tuple(map(tuple, shapes)) * (parallel.ep_size() if of_experts else 1),
            parameter.dtype,
            holders if of_experts else (),
        )
    if parallel.pp_size() == 1:
        return mine
    stages: list[dict[str, Home]] = [{} for _ in range(parallel.pp_size())]
    dist.all_gather_object(stages, mine, group=parallel.pp_group())
    return {name: home for stage in reversed(stages) for name, home in stage.items()}  # the first stage's word counts


def _holders_of_experts() -> tuple[tuple[int, ...], ...]:
    """For each expert-parallel rank of this stage, the ranks that hold the cuts of its experts. Collective."""
    if parallel.world_size() == 1:
        return ((0,),)
    places: list[tuple[int, int, int]] = [(0, 0, 0)] * parallel.world_size()
    dist.all_gather_object(places, parallel.expert_place())
    return tuple(
        tuple(places.index((parallel.pp_rank(), ep, cut)) for cut in range(parallel.etp_size()))
        for ep in range(parallel.ep_size())
    )


def outlines(names: NameMap, where: Mapping[str, Home]) -> list[tuple[str, Tensor]]:
    """Every HF tensor that `hf_tensors` gives, in its order, without contents (on torch's "meta" device)."""
    return [
        (hf_name, torch.empty(shape, dtype=where[name].dtype, device="meta"))
        for name in names.megatron_names()
        for hf_name, shape in zip(names.to_hf(name).hf, where[name].shapes, strict=True)
    ]


@torch.no_grad()
def hf_tensors(
    chunks: Sequence[torch.nn.Module], names: NameMap, model: ModelSettings, where: Mapping[str, Home]
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of the whole model, in the name table's order: on rank 0 its values, elsewhere its outline.

    An outline is on torch's "meta" device: shape and dtype without contents. Collective: all ranks must go on to the
    end, at the same pace. At most one tensor is a copy at a time.

    Args: where: as `homes` gives it.
    """
    parameters = dict(named_parameters(chunks, tied=model.tie_word_embeddings))
    for name in names.megatron_names():
        home, entry = where[name], names.to_hf(name)
        parts: dict[str, Tensor] = {}
        if home.stage == parallel.pp_rank():
            own = own_names(entry)
            parts = dict(zip(own.hf, split(parameters[name].detach(), own, model), strict=True))
        for i, (hf_name, shape) in enumerate(zip(entry.hf, home.shapes, strict=True)):
            if home.holders:
                yield hf_name, _collect_expert(parts.get(hf_name), home, shape, i * len(home.holders) // len(entry.hf))
                continue
            # No name keeps a tensor here while the next is put together.
            yield hf_name, _without_padding(_collect(parts.get(hf_name), home, shape), name, shape)


def _without_padding(whole: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    # Rows are cut last: only the rank that has the whole knows where it ends.
    return whole[: shape[0]] if name in VOCABULARY else whole


def _collect(part: Tensor | None, home: Home, shape: Sequence[int]) -> Tensor:
    """The whole tensor on rank 0, its outline elsewhere. Args: part: this rank's cut, on the tensor's own stage."""
    outline = torch.empty(shape, dtype=home.dtype, device="meta")
    if parallel.dp_rank() or parallel.cp_rank():
        return outline  # these have copies
    whole = part
    if part is not None and home.cut is not None:
        whole = _gather(part, home.cut.dim)
    if parallel.tp_rank():
        return outline
    if home.stage:
        first = dist.get_process_group_ranks(parallel.pp_group())[0]
        if whole is not None:
            dist.send(whole[: shape[0]].contiguous(), dst=first, group=parallel.pp_group())
        elif parallel.pp_rank() == 0:
            whole = torch.empty(shape, dtype=home.dtype, device=torch.cuda.current_device())
            source = dist.get_process_group_ranks(parallel.pp_group())[home.stage]
            dist.recv(whole, src=source, group=parallel.pp_group())
    if parallel.pp_rank():
        return outline
    assert whole is not None, "rank 0 has neither the tensor nor whom to get it from"
    return whole


def _collect_expert(part: Tensor | None, home: Home, shape: Sequence[int], ep_rank: int) -> Tensor:
    """One expert's whole tensor on rank 0, its outline elsewhere. Args: part: this rank's cut, where it has one."""
    rank, holders = dist.get_rank(), home.holders[ep_rank]
    if rank:
        if rank in holders:
            assert part is not None, "a holder of an expert without it"
            dist.send(part.contiguous(), dst=0)
        return torch.empty(shape, dtype=home.dtype, device="meta")
    cut_shape = list(shape)
    if home.cut is not None:
        cut_shape[home.cut.dim] //= home.cut.parts
    cuts = []
    for holder in holders:
        cut = part if holder == 0 else torch.empty(cut_shape, dtype=home.dtype, device=torch.cuda.current_device())
        assert cut is not None, "rank 0 is told of experts that it does not have"
        if holder:
            dist.recv(cut, src=holder)
        cuts.append(cut)
    return torch.cat(cuts, home.cut.dim) if home.cut is not None else cuts[0]


def _gather(part: Tensor, dim: int) -> Tensor | None:
    """The parts of all tensor-parallel ranks, one behind the other, on the first of them."""
    group = parallel.tp_group()
    first = dist.get_process_group_ranks(group)[0]
    part = part.contiguous()
    if parallel.tp_rank():
        dist.gather(part, dst=first, group=group)
        return None
    parts = [torch.empty_like(part) for _ in range(parallel.tp_size())]
    dist.gather(part, parts, dst=first, group=group)
    return torch.cat(parts, dim)


def merge(parts: Sequence[Tensor], kind: Kind, model: ModelSettings) -> Tensor:
    """HF tensors to one Megatron tensor; cuts of them to the same cut of it.

    Raises: ValueError if their shapes do not go together.
    """
    if kind is Kind.PLAIN:
        return parts[0]
    if kind is Kind.GLU:
        return torch.cat(list(parts))
    assert kind is Kind.QKV, f"tensors of kind {kind} are copied one by one"
    width = model.transformer["kv_channels"]
    groups = parts[1].shape[0] // width
    if any(not groups or p.shape[0] % (groups * width) for p in parts):
        raise ValueError("query, key and value rows do not form groups of heads")
    by_group = [p.reshape(groups, -1, width, *p.shape[1:]) for p in parts]
    return torch.cat(by_group, 1).flatten(0, 2)


def split(tensor: Tensor, entry: Names, model: ModelSettings) -> Sequence[Tensor]:
    """One Megatron tensor to its HF tensors, or a cut of it to cuts of them; the inverse of `merge`."""
    if entry.kind is Kind.PLAIN:
        return [tensor]
    if entry.kind is Kind.GLU:
        return tensor.chunk(2)
    if entry.kind in OF_EXPERTS:
        return (tensor.flatten(0, 1) if entry.kind is Kind.EXPERTS_GLU else tensor).unbind()
    t = model.transformer
    width, per_group = t["kv_channels"], t["num_attention_heads"] // t["num_query_groups"]
    by_group = tensor.view(-1, per_group + 2, width, *tensor.shape[1:])
    return [part.flatten(0, 2) for part in torch.split(by_group, [per_group, 1, 1], 1)]
