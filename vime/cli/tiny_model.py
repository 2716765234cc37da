"""What a tiny random model looks like: its shape, its config in transformers' words, its layer behind the last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What vLLM's attention on CPUs takes; GPUs take these too.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe", "qwen2", "llama")
_BOTH, _GLM = ("qwen3_moe", "glm4_moe"), ("glm4_moe",)
# Field -> its default, the families that have it, help.
OF_EXPERTS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "num_experts": (8, _BOTH, "routed experts of a layer"),
    "experts_per_token": (2, _BOTH, "of them that see a token"),
    "expert_ffn_size": (128, _BOTH, "width inside an expert"),
    "num_shared_experts": (1, _GLM, "experts that see every token"),
    "num_dense_layers": (1, _GLM, "leading layers without experts"),
    "num_mtp_layers": (0, _GLM, "layers of multi-token prediction behind the last one"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of a model to make; the defaults give 0.8M parameters. None: the default of `OF_EXPERTS`."""

    family: str = "qwen3"
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    ffn_size: int = 384
    max_positions: int = 1024
    tie_embeddings: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn_size: int | None = None
    num_shared_experts: int | None = None
    num_dense_layers: int | None = None
    num_mtp_layers: int | None = None
    vocab: str = "chars"
    dtype: str = "float32"
    seed: int = 0

    def of_experts(self, name: str) -> int:
        """A field of `OF_EXPERTS`, or its default."""
        given = getattr(self, name)
        return OF_EXPERTS[name][0] if given is None else int(given)

    def problems(self) -> list[str]:
        """What is wrong with this shape, one sentence each."""
        found = []
        if self.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            found.append(f"--head-size is {self.head_size}, but vLLM's CPU attention takes only {sizes}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            found.append(f"--num-kv-heads is {self.num_kv_heads}, which does not divide --num-heads {self.num_heads}")
        for name in ("hidden_size", "num_layers", "num_heads", "ffn_size", "max_positions"):
            if getattr(self, name) < 1:
                found.append(f"{_flag(name)} is {getattr(self, name)}, but must be at least 1")
        if not 0 <= self.seed < 2**64:
            found.append(f"--seed is {self.seed}, but must be at least 0 and below 2^64")
        return found + self._problems_of_experts()

    def _problems_of_experts(self) -> list[str]:
        found = []
        for name, (_, families, _) in OF_EXPERTS.items():
            if getattr(self, name) is not None and self.family not in families:
                found.append(f"{_flag(name)} is given, but --family {self.family} does not have it; leave it out")
        if self.family not in _BOTH:
            return found
        for name, least in (("num_experts", 2), ("expert_ffn_size", 1), ("num_mtp_layers", 0)):
            if self.of_experts(name) < least:
                found.append(f"{_flag(name)} is {self.of_experts(name)}, but must be at least {least}")
        chosen, experts = self.of_experts("experts_per_token"), self.of_experts("num_experts")
        if not 2 <= chosen <= experts:
            found.append(f"--experts-per-token is {chosen}, but must be from 2 to --num-experts {experts}")
        if self.family in _GLM and not 0 <= self.of_experts("num_dense_layers") < self.num_layers:
            found.append(
                f"--num-dense-layers is {self.of_experts('num_dense_layers')}, but must leave one of --num-layers "
                f"{self.num_layers} with experts"
            )
        if self.family in _GLM and self.of_experts("num_shared_experts") < 1:
            found.append(f"--num-shared-experts is {self.of_experts('num_shared_experts')}, but must be at least 1")
        return found

    def hf_config(self, tokenizer: Any) -> Any:
        """transformers' config of the model. Args: tokenizer: gives vocabulary and special tokens."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.ffn_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=self.tie_embeddings,
            rms_norm_eps=1e-6,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=self.dtype,
            **self._experts_in_hf_words(),
        )

    def _experts_in_hf_words(self) -> dict[str, Any]:
        if self.family not in _BOTH:
            return {}
        words = {
            "num_experts_per_tok": self.of_experts("experts_per_token"),
            "moe_intermediate_size": self.of_experts("expert_ffn_size"),
            "norm_topk_prob": True,
        }
        if self.family not in _GLM:
            return words | {"num_experts": self.of_experts("num_experts")}
        return words | {
            "n_routed_experts": self.of_experts("num_experts"),
            "n_shared_experts": self.of_experts("num_shared_experts"),
            "first_k_dense_replace": self.of_experts("num_dense_layers"),
            "num_nextn_predict_layers": self.of_experts("num_mtp_layers"),
            "attention_bias": True,
            "use_qk_norm": True,
        }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_mtp_layers(folder: Path, *, num_layers: int, num_mtp_layers: int, std: float = 0.02, seed: int = 0) -> None:
    """Put random layers of multi-token prediction behind a checkpoint's last one, named as GLM-4.5's are.

    transformers does not write them: its model has none.

    Args:
        folder: holds model.safetensors.
        num_layers: layers that the checkpoint has; the last one's shapes are taken.
        std: of the matrices.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    norm = tensors["model.norm.weight"]
    last = f"model.layers.{num_layers - 1}."
    for k in range(num_layers, num_layers + num_mtp_layers):
        new = f"model.layers.{k}."
        made = {new + name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
        made |= {new + f"{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
        made[new + "eh_proj.weight"] = torch.cat((norm, norm)).expand(len(norm), -1)
        for name, like in made.items():
            values = torch.randn(like.shape, generator=generator) * std + (1.0 if "norm" in name else 0.0)
            tensors[name] = values.to(like.dtype)
        # The embedding and the head of such a layer are the model's own.
        tensors |= {new + "embed_tokens.weight": embedding.clone(), new + "shared_head.head.weight": head.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
