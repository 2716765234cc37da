"""From a checkpoint's settings and the user's Megatron flags to megatron-core's config objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.config import stages
from vime.config.parallel import ParallelSizes, parallel_sizes
from vime.errors import ConfigError
from vime.models import ModelSettings
from vime.trainer.megatron.patches.fixes import fix_version_of_missing_te
from vime.trainer.megatron.patches.limits import EXPERTS, NO_FUSIONS, limits

# Settings of experts whose one supported value is not megatron-core's default.
_EXPERTS_DIFFER = (
    "moe_router_load_balancing_type",
    "moe_router_dtype",
    "moe_router_bias_update_rate",
    "moe_grouped_gemm",  # megatron-core would refuse --recompute-modules moe_act without
)


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """What the trainer is built from."""

    transformer: TransformerConfig
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    sizes: ParallelSizes
    padded_vocab_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        dtype: torch.dtype = self.transformer.params_dtype
        return dtype


def megatron_settings(
    model: ModelSettings, overrides: Mapping[str, Any], *, device_type: str, world_size: int = 1
) -> MegatronSettings:
    """Megatron's config objects.

    Args:
        model: the checkpoint's own settings.
        overrides: the user's, by field name; each must be a field of one of the three objects, or of the checkpoint.
        device_type: "cpu" or "cuda".
        world_size: training ranks.
    Raises: ConfigError listing every override that is unknown, cannot be done, or contradicts the checkpoint.
    """
    rest = dict(overrides)
    problems = _pop_checkpoint_facts(model, rest)
    sizes = parallel_sizes(overrides)
    problems += sizes.problems(world_size, model.transformer, on_cpu=device_type == "cpu")
    for name in (*stages.FIELDS, "overlap_p2p_comm", "batch_p2p_comm"):
        rest.pop(name, None)  # read by `sizes`
    multiple = rest.pop("make_vocab_size_divisible_by", 1) * sizes.tensor
    dtype = _dtype(model, rest, problems)
    bf16 = dtype == torch.bfloat16
    has_experts = model.transformer.get("num_moe_experts") is not None
    for name, (value, reason) in limits(overrides, has_experts=has_experts).items():
        if name in rest and rest.pop(name) != value:
            problems.append(f"--{name.replace('_', '-')} {overrides[name]} is not supported: {reason}")
    known = {
        c: {f.name for f in fields(c)} for c in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    }
    problems += [f"no part of Megatron reads the setting {name!r}" for name in rest if not _known(name, known)]
    if rest.get("lr") is None:
        problems.append("--lr is not set; give the peak learning rate, such as 1e-6")
    if problems:
        raise ConfigError(problems)

    def pick(cls: type) -> dict[str, Any]:
        return {name: value for name, value in rest.items() if name in known[cls]}

    precision = {"bf16": bf16, "params_dtype": dtype}
    shared = {"use_distributed_optimizer": rest.get("use_distributed_optimizer", True)}
    transformer = {
        **model.transformer,
        "activation_func": getattr(F, model.transformer["activation_func"]),
        **precision,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": device_type == "cpu",
        "calculate_per_token_loss": True,
        # Pipeline stages tell each other how long a micro-batch is; megatron-core accepts it with this dispatcher only.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        **({name: EXPERTS[name][0] for name in _EXPERTS_DIFFER} if has_experts else {}),
        **_pipeline(sizes.stages.layers(model.transformer["num_layers"]), sizes.pipeline),
        **dict.fromkeys(NO_FUSIONS, False),
        # torch.compile's, worth its start-up time on CUDA only. bias_dropout_fusion is not: without dropout it is one
        # addition, of which the compiled call costs the host several times as much, and mixtures exceed its limit of
        # recompilations.
        "bias_activation_fusion": device_type == "cuda",
        **pick(TransformerConfig),
    }
    return MegatronSettings(
        transformer=TransformerConfig(**transformer),
        optimizer=OptimizerConfig(**{**precision, "min_lr": 0.0, **_on_host(rest), **pick(OptimizerConfig), **shared}),
        ddp=DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, **pick(DistributedDataParallelConfig), **shared}
        ),
        sizes=sizes,
        padded_vocab_size=-(-model.vocab_size // multiple) * multiple,
    )


def _pipeline(layers: Sequence[int], ranks: int) -> dict[str, Any]:
    """What Megatron needs to know of the pipeline stages. Args: layers: of each stage, over all ranks in turn."""
    if ranks == 1:
        return {}
    # One way to say it for all: in another of Megatron's, uneven and interleaved stages on two ranks divide by zero.
    layout = [["decoder"] * n for n in layers]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    interleaved = len(layers) > ranks
    return {
        "pipeline_model_parallel_layout": layout,
        "virtual_pipeline_model_parallel_size": len(layers) // ranks if interleaved else None,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _on_host(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an optimizer on the host: the whole of it, as in Megatron-LM, with masters nowhere else."""
    if not rest.get("optimizer_cpu_offload"):
        return {}
    fix_version_of_missing_te()
    return {"optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}


def _known(name: str, known: Mapping[type, set[str]]) -> bool:
    return any(name in names for names in known.values())


def _dtype(model: ModelSettings, rest: dict[str, Any], problems: list[str]) -> torch.dtype:
    """bf16 when asked for, the checkpoint's dtype otherwise."""
    bf16 = rest.pop("bf16", None)
    if bf16 is not None:
        return torch.bfloat16 if bf16 else torch.float32
    if model.dtype not in ("float32", "bfloat16"):
        problems.append(f"the checkpoint's dtype is {model.dtype}, which is not trained in; add --bf16")
    return torch.bfloat16 if model.dtype == "bfloat16" else torch.float32


def _pop_checkpoint_facts(model: ModelSettings, rest: dict[str, Any]) -> list[str]:
    """Take out what describes the checkpoint; sentences for what contradicts it."""
    t = model.transformer
    facts = {
        "num_moe_experts": None,
        **{name: value for name, value in t.items() if name not in ("activation_func", "init_method_std")},
        "swiglu": t["gated_linear_unit"] and t["activation_func"] == "silu",
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "use_rotary_position_embeddings": True,
        "position_embedding_type": "rope",
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "group_query_attention": t["num_query_groups"] < t["num_attention_heads"],
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
    }
    return [
        f"--{name.replace('_', '-')} is {given}, but the checkpoint has {facts[name]}; leave it out"
        for name, given in [(n, rest.pop(n)) for n in list(rest) if n in facts]
        if given != facts[name]
    ]
