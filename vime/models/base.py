"""What a model family must say: its Megatron settings, and one table of names that serves both directions.

A family is one file with one `Family` object. Nothing here imports torch or Megatron: the table is data, and the
trainer applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vime.errors import ConfigError


class Kind(Enum):
    """How a Megatron tensor is laid out from its HF tensors."""

    PLAIN = "plain"  # the same tensor
    QKV = "qkv"  # q, k, v interleaved: for each key/value head its query heads, then k, then v
    GLU = "glu"  # gate, then up, stacked


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a name table. `{i}` stands for the layer's number, counted from 0 over the whole model."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = Kind.PLAIN


@dataclass(frozen=True, slots=True)
class Names:
    """The HF names of one Megatron tensor, in the order its kind needs."""

    hf: tuple[str, ...]
    kind: Kind


class NameMap:
    """The name table of one model, both ways."""

    def __init__(self, rules: Iterable[Rule], num_layers: int) -> None:
        self._names: dict[str, Names] = {}
        self._megatron: dict[str, str] = {}
        for rule in rules:
            for i in range(num_layers) if "{i}" in rule.megatron else (0,):
                key = rule.megatron.replace("{i}", str(i))
                names = tuple(name.replace("{i}", str(i)) for name in rule.hf)
                self._names[key] = Names(names, rule.kind)
                self._megatron.update(dict.fromkeys(names, key))

    def to_hf(self, megatron_name: str) -> Names:
        """The HF tensors that make up a Megatron tensor. Raises: KeyError for a name the family does not have."""
        return self._names[megatron_name]

    def to_megatron(self, hf_name: str) -> str:
        """The Megatron tensor an HF tensor goes into. Raises: KeyError for a name the family does not have."""
        return self._megatron[hf_name]

    def megatron_names(self) -> list[str]:
        """All Megatron names, in the table's order."""
        return list(self._names)

    def hf_names(self) -> list[str]:
        """All HF names, in the table's order."""
        return list(self._megatron)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A checkpoint's architecture, in Megatron's words."""

    transformer: Mapping[str, Any]
    """Fields of megatron-core's TransformerConfig; `activation_func` is the name of a torch.nn.functional."""
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    tie_word_embeddings: bool
    dtype: str
    """torch dtype name of the checkpoint's tensors: "float32", "bfloat16", "float16"."""


class Family(ABC):
    """One architecture. `vime.models.family_of` picks it by the checkpoint's own words."""

    model_type: str
    """`model_type` in config.json."""
    architecture: str
    """The causal language model's class name in config.json's `architectures`."""

    def settings(self, hf: Mapping[str, Any]) -> ModelSettings:
        """Megatron settings of a checkpoint.

        Args: hf: its config.json.
        Raises: ConfigError listing everything the checkpoint asks for that cannot be done, or that is missing.
        """
        problems = [*self.problems(hf), *_missing(hf)]
        if problems:
            raise ConfigError([f"model of type {self.model_type}: {p}" for p in problems])
        heads = hf["num_attention_heads"]
        transformer = {
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": hf.get("num_key_value_heads") or heads,
            "kv_channels": self.head_dim(hf),
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": hf.get("initializer_range", 0.02),
            **self.transformer(hf),
        }
        return ModelSettings(
            transformer=transformer,
            vocab_size=hf["vocab_size"],
            max_position_embeddings=hf["max_position_embeddings"],
            rotary_base=rotary_base(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
        )

    def name_map(self, settings: ModelSettings) -> NameMap:
        """The name table of a model with these settings; a tied head has no tensor of its own."""
        top = [
            Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
            *self.layer_rules(),
            Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        ]
        if not settings.tie_word_embeddings:
            top.append(Rule("output_layer.weight", ("lm_head.weight",)))
        return NameMap(top, settings.transformer["num_layers"])

    @abstractmethod
    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """TransformerConfig fields in which this family differs from the ones `settings` reads."""

    @abstractmethod
    def layer_rules(self) -> list[Rule]:
        """The names of a decoder layer's tensors."""

    @abstractmethod
    def head_dim(self, hf: Mapping[str, Any]) -> int:
        """Width of one attention head."""

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        """What the checkpoint asks for that this family's implementation cannot do, one sentence each."""
        return unsupported_rope(hf) + unsupported_values(
            hf, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0}
        )


def attention_and_mlp_rules(*, qk_norm: bool) -> list[Rule]:
    """The layer names that dense decoders with gated MLPs share."""
    hf, megatron = "model.layers.{i}.", "decoder.layers.{i}."
    rules = [
        Rule(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
        Rule(
            megatron + "self_attention.linear_qkv.weight",
            tuple(hf + f"self_attn.{x}_proj.weight" for x in "qkv"),
            Kind.QKV,
        ),
    ]
    if qk_norm:
        rules += [
            Rule(megatron + f"self_attention.{x}_layernorm.weight", (hf + f"self_attn.{x}_norm.weight",)) for x in "qk"
        ]
    return [
        *rules,
        Rule(megatron + "self_attention.linear_proj.weight", (hf + "self_attn.o_proj.weight",)),
        Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
        Rule(megatron + "mlp.linear_fc1.weight", (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"), Kind.GLU),
        Rule(megatron + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",)),
    ]


def rotary_base(hf: Mapping[str, Any]) -> float:
    """RoPE's base, from transformers 5's `rope_parameters` or the older `rope_theta`; transformers' default is 1e4."""
    parameters = hf.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", hf.get("rope_theta", 10_000.0)))


def unsupported_rope(hf: Mapping[str, Any]) -> list[str]:
    """Sentences for RoPE variants that are not plain RoPE over the whole head."""
    problems = []
    for key in ("rope_parameters", "rope_scaling"):
        parameters = hf.get(key) or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            problems.append(f"{key} asks for RoPE scaling of type {kind!r}; only plain RoPE is supported")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(
                f"{key}.partial_rotary_factor is {parameters['partial_rotary_factor']}; only 1 is supported"
            )
    if hf.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor is {hf['partial_rotary_factor']}; only 1 is supported")
    return problems


def unsupported_values(hf: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Sentences for keys that are set to something other than the one value that is supported."""
    return [
        f"{key} is {hf[key]!r}; only {value!r} is supported"
        for key, value in expected.items()
        if hf.get(key) is not None and hf[key] != value
    ]


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def _missing(hf: Mapping[str, Any]) -> list[str]:
    return [f"config.json lacks {key}" for key in _REQUIRED if not isinstance(hf.get(key), int)]
