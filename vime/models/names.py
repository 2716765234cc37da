"""One table of tensor names for both directions: a checkpoint's into Megatron's, and back.

Nothing here imports torch or Megatron: the table is data, and the trainer applies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from vime.models.settings import ModelSettings

Shape = tuple[int, ...]
CORRECTION_BIAS = ".e_score_correction_bias"
"""How the HF name of a router's bias ends, which is float32 whatever the weights are."""


class Kind(Enum):
    """How a Megatron tensor is laid out from its HF tensors."""

    PLAIN = "plain"  # the same tensor
    QKV = "qkv"  # q, k, v interleaved: for each key/value head its query heads, then k, then v; weights and biases
    GLU = "glu"  # gate, then up, stacked
    EXPERTS = "experts"  # [E, out, in]: every expert's matrix
    EXPERTS_GLU = "experts_glu"  # [E, 2, I, H]: every expert's gate and up; HF's names expert by expert, gate first


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor, and the HF tensors that make it up in the order its kind needs."""

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Of each HF tensor; one for all of them where they are alike."""
    kind: Kind = Kind.PLAIN


@dataclass(frozen=True, slots=True)
class Names:
    """The HF names of one Megatron tensor, in the order its kind needs."""

    hf: tuple[str, ...]
    kind: Kind


class NameMap:
    """The name table of one model.

    Args:
        rules: every tensor of the model, the layers' in their order.
        kept_layers: numbers of HF layers whose tensors are no part of the model, and stay in its checkpoint as they
            are (multi-token prediction).
        kept_shapes: of such layers' HF tensors, those that the family knows; they may be missing, or others be there.
    """

    def __init__(
        self, rules: Iterable[Rule], kept_layers: Iterable[int] = (), kept_shapes: Mapping[str, Shape] | None = None
    ) -> None:
        rules = list(rules)
        self._shapes = dict(shape for rule in rules for shape in shapes_of(rule))
        self._kept_shapes = dict(kept_shapes or {})
        self._names = {rule.megatron: Names(rule.hf, rule.kind) for rule in rules}
        self._kept_layers = frozenset(kept_layers)

    def to_hf(self, megatron_name: str) -> Names:
        """The HF tensors that make up a Megatron tensor. Raises: KeyError for a name the family does not have."""
        return self._names[megatron_name]

    def megatron_names(self) -> list[str]:
        """All Megatron names, in the table's order."""
        return list(self._names)

    def hf_names(self) -> list[str]:
        """All HF names of the model, in the table's order; those of kept layers are not among them."""
        return [name for names in self._names.values() for name in names.hf]

    def shapes(self) -> Mapping[str, Shape]:
        """HF name -> shape, of all tensors of the model in the table's order."""
        return self._shapes

    def kept_shapes(self) -> Mapping[str, Shape]:
        """The same of tensors of kept layers, as far as it is known."""
        return self._kept_shapes

    def is_kept(self, hf_name: str) -> bool:
        """Whether an HF tensor is neither trained nor sent to engines, but copied from checkpoint to checkpoint."""
        layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
        return layer is not None and int(layer[1]) in self._kept_layers


def shapes_of(rule: Rule) -> Iterator[tuple[str, Shape]]:
    """Each HF tensor of a rule with its shape."""
    shapes = rule.shapes * len(rule.hf) if len(rule.shapes) == 1 else rule.shapes
    return zip(rule.hf, shapes, strict=True)


def decoder_layer_rules(i: int, settings: ModelSettings) -> list[Rule]:
    """The tensors of decoder layer `i`, counted from 0 over the whole model, as Llama's and its descendants' are named.

    The settings say which there are, and how large: biases of q, k and v, norms of each query and key head, and experts
    in the layers that have them.
    """
    t = settings.transformer
    hf, megatron = f"model.layers.{i}.", f"decoder.layers.{i}."
    hidden, width = t["hidden_size"], t["kv_channels"]
    q, kv = t["num_attention_heads"] * width, t["num_query_groups"] * width
    norm: tuple[Shape, ...] = ((hidden,),)
    qkv: dict[str, Shape] = {"weight": (hidden,), **({"bias": ()} if t["add_qkv_bias"] else {})}
    head_norms = "qk" if t["qk_layernorm"] else ""
    return [
        Rule(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), norm),
        *(
            Rule(
                megatron + f"self_attention.linear_qkv.{part}",
                tuple(hf + f"self_attn.{x}_proj.{part}" for x in "qkv"),
                ((q, *columns), (kv, *columns), (kv, *columns)),
                Kind.QKV,
            )
            for part, columns in qkv.items()
        ),
        *(
            Rule(megatron + f"self_attention.{x}_layernorm.weight", (hf + f"self_attn.{x}_norm.weight",), ((width,),))
            for x in head_norms
        ),
        Rule(megatron + "self_attention.linear_proj.weight", (hf + "self_attn.o_proj.weight",), ((hidden, q),)),
        Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), norm),
        *(
            _expert_rules(hf + "mlp.", megatron + "mlp.", settings)
            if settings.has_experts(i)
            else _mlp_rules(hf + "mlp.", megatron + "mlp.", hidden, t["ffn_hidden_size"])
        ),
    ]


def _mlp_rules(hf: str, megatron: str, hidden: int, inner: int) -> list[Rule]:
    """A gated MLP."""
    gate_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return [
        Rule(megatron + "linear_fc1.weight", gate_up, ((inner, hidden),), Kind.GLU),
        Rule(megatron + "linear_fc2.weight", (hf + "down_proj.weight",), ((hidden, inner),)),
    ]


def _expert_rules(hf: str, megatron: str, settings: ModelSettings) -> list[Rule]:
    """A router, the experts it chooses from, and those that see every token."""
    t = settings.transformer
    hidden, inner, count = t["hidden_size"], t["moe_ffn_hidden_size"], t["num_moe_experts"]
    experts = [f"{hf}experts.{e}." for e in range(count)]
    rules = [Rule(megatron + "router.weight", (hf + "gate.weight",), ((count, hidden),))]
    if t.get("moe_router_enable_expert_bias"):
        rules.append(Rule(megatron + "router.expert_bias", (hf + "gate" + CORRECTION_BIAS,), ((count,),)))
    gate_up = tuple(e + f"{x}_proj.weight" for e in experts for x in ("gate", "up"))
    down = tuple(e + "down_proj.weight" for e in experts)
    rules += [
        Rule(megatron + "experts.gate_up", gate_up, ((inner, hidden),), Kind.EXPERTS_GLU),
        Rule(megatron + "experts.down", down, ((hidden, inner),), Kind.EXPERTS),
    ]
    if shared := t.get("moe_shared_expert_intermediate_size"):
        rules += _mlp_rules(hf + "shared_experts.", megatron + "shared_experts.", hidden, shared)
    return rules
