"""What a model family must say: its Megatron settings, and its tensors' names.

A family is one file with one `Family` object. Most share the names in `names.py`; what differs is what config.json says
and what of it can be done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from vime.errors import ConfigError
from vime.models.config_values import value_problems
from vime.models.names import NameMap, Rule, Shape, decoder_layer_rules
from vime.models.rope import rope_scaling, rotary_base, rotary_percent, unsupported_rope
from vime.models.settings import ModelSettings

_NEVER = {
    "compression_config": "quantised weights cannot be trained; take the checkpoint in bfloat16",
    "quantization_config": "quantised weights cannot be trained; take the checkpoint in bfloat16",
    "dual_chunk_attention_config": "vLLM would attend in chunks, which the trainer does not; remove it for contexts "
    "within max_position_embeddings",
}
"""Keys of config.json that no family can follow."""


class Family(ABC):
    """One architecture. `vime.models.family_of` picks it by the checkpoint's own words."""

    model_type: str
    """`model_type` in config.json."""
    architecture: str
    """The causal language model's class name in config.json's `architectures`."""
    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_dropout": 0, "is_causal": True}
    """Keys of config.json with the one value that is supported; a checkpoint may leave them out."""
    required: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    """Keys of config.json that must be whole numbers."""
    default_rotary_percent: ClassVar[float] = 1.0
    """Part of each head that is rotated where config.json does not say; 1: the model has no other."""
    has_window_switch: ClassVar[bool] = False
    """Whether use_sliding_window turns windows of attention on; without such a switch their width does."""

    def settings(self, hf: Mapping[str, Any]) -> ModelSettings:
        """Megatron settings of a checkpoint.

        Args: hf: its config.json.
        Raises: ConfigError listing everything the checkpoint asks for that cannot be done, or that is missing.
        """
        wrong = value_problems(hf)
        missing = [f"config.json lacks {key}" for key in self.required if key not in hf]
        # What the family says of values rests on their being numbers.
        if problems := [*(wrong or self.problems(hf)), *missing]:
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
            "qk_layernorm": False,
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
            rotary_percent=rotary_percent(hf, self.default_rotary_percent),
            rope_scaling=rope_scaling(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            num_mtp_layers=self.num_mtp_layers(hf),
        )

    def name_map(self, settings: ModelSettings) -> NameMap:
        """The table of names and shapes of a model with these settings; a tied head has no tensor of its own."""
        num_layers, hidden = settings.transformer["num_layers"], settings.transformer["hidden_size"]
        vocabulary = ((settings.vocab_size, hidden),)
        rules = [Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)]
        for i in range(num_layers):
            rules += self.layer_rules(i, settings)
        rules.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),)))
        if not settings.tie_word_embeddings:
            rules.append(Rule("output_layer.weight", ("lm_head.weight",), vocabulary))
        kept_layers = range(num_layers, num_layers + settings.num_mtp_layers)
        kept_shapes = {name: shape for i in kept_layers for name, shape in self.mtp_shapes(i, settings).items()}
        return NameMap(rules, kept_layers, kept_shapes)

    @abstractmethod
    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """TransformerConfig fields in which this family differs from the ones `settings` reads."""

    def layer_rules(self, layer: int, settings: ModelSettings) -> list[Rule]:
        """The names of one decoder layer's tensors. Args: layer: counted from 0 over the whole model."""
        return decoder_layer_rules(layer, settings)

    def mtp_shapes(self, layer: int, settings: ModelSettings) -> dict[str, Shape]:
        """HF name -> shape of what a layer of multi-token prediction may hold; what is not named may have any.

        Args: layer: counted from 0 over the whole checkpoint, the model's own layers before it.
        """
        return {}

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        """Width of one attention head."""
        return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])

    def num_mtp_layers(self, hf: Mapping[str, Any]) -> int:
        """Multi-token-prediction layers that the checkpoint may have behind its last layer."""
        return 0

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        """What the checkpoint asks for that this family's implementation cannot do, one sentence each."""
        return [
            *unsupported_rope(hf, whole_heads=self.default_rotary_percent == 1),
            *(
                f"{key} is {hf[key]!r}; only {value!r} is supported"
                for key, value in self.only.items()
                if hf.get(key) is not None and hf[key] != value
            ),
            *(f"{key} is set: {why}" for key, why in _NEVER.items() if hf.get(key)),
            *_windows(hf, has_switch=self.has_window_switch),
        ]


def _windows(hf: Mapping[str, Any], *, has_switch: bool) -> list[str]:
    """A sentence if the checkpoint's attention does not see all earlier tokens in every layer: vLLM would obey it."""
    others = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    switch, window = hf.get("use_sliding_window"), hf.get("sliding_window")
    if switch or others:
        return [
            f"it uses sliding-window attention (use_sliding_window {switch}, layer_types {others}); "
            "only full attention is supported"
        ]
    return [f"sliding_window is {window}; only full attention is supported"] if window and not has_switch else []


def mixture(
    *, num_experts: int, top_k: int, ffn_size: int, layers: list[int], score: str, normalised: bool
) -> dict[str, Any]:
    """TransformerConfig fields of a mixture of experts.

    Args:
        num_experts, top_k: routed experts of a layer, and how many of them see a token.
        ffn_size: an expert's inner width.
        layers: 1 for each layer with experts, 0 for each without.
        score: what turns router logits into weights, "softmax" or "sigmoid".
        normalised: whether the chosen experts' weights add up to 1.
    """
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": ffn_size,
        "moe_layer_freq": layers,
        "moe_router_score_function": score,
    }
    if score == "softmax":  # a softmax over the chosen alone is one over all, normalised; sigmoids always are
        fields["moe_router_pre_softmax"] = not normalised
    return fields
