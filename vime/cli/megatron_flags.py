"""Megatron's flags, read from the source of megatron-core's dataclasses without importing it (or torch).

Megatron-LM's spelling wins where it differs from the field's: megatron-core notes it in a field's `argparse_meta`
since 0.16, and `ALIASES` adds the rest. `CHECKPOINT_ONLY` are names of megatron.training that describe the model.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.cli.flag import Flag
from vime.cli.vime_flags import vime_flags
from vime.errors import ConfigError

SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)

ALIASES: dict[str, tuple[str, Any]] = {
    # Megatron-LM's name -> (megatron-core field, the value it sets; ... takes the flag's own value)
    "num-experts": ("num_moe_experts", ...),
    "accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", True),
    "no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", False),
    "ddp-bucket-size": ("bucket_size", ...),
    "ddp-average-in-collective": ("average_in_collective", True),
    "ddp-pad-buckets-for-high-nccl-busbw": ("pad_buckets_for_high_nccl_busbw", True),
    "ddp-reduce-scatter-with-fp32-accumulation": ("reduce_scatter_with_fp32_accumulation", True),
    "no-rope-fusion": ("apply_rope_fusion", False),
    "no-bias-swiglu-fusion": ("bias_activation_fusion", False),
    "no-bias-gelu-fusion": ("bias_activation_fusion", False),
    "num-virtual-stages-per-pipeline-rank": ("virtual_pipeline_model_parallel_size", ...),
    "decoder-first-pipeline-num-layers": ("num_layers_in_first_pipeline_stage", ...),
    "decoder-last-pipeline-num-layers": ("num_layers_in_last_pipeline_stage", ...),
    "overlap-p2p-communication": ("overlap_p2p_comm", True),
    "no-overlap-p2p-communication": ("overlap_p2p_comm", False),
    "recompute-activations": ("recompute_granularity", "selective"),
}

CHECKPOINT_ONLY: dict[str, tuple[str, str, Any, str]] = {
    # Megatron-LM's name -> (key in `vime.config.hf.megatron_shape`, kind, the value it sets, help)
    "swiglu": ("swiglu", "bool", True, "gated linear units with SiLU"),
    "untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", "bool", True, "a head of its own"),
    "use-rotary-position-embeddings": ("use_rotary_position_embeddings", "bool", True, "rotary positions"),
    "position-embedding-type": ("position_embedding_type", "str", ..., "kind of position embedding"),
    "rotary-base": ("rotary_base", "float", ..., "base of the rotary frequencies"),
    "rotary-percent": ("rotary_percent", "float", ..., "part of each head that is rotated, 0 to 1"),
    "group-query-attention": ("group_query_attention", "bool", True, "fewer key-value heads than heads"),
    "vocab-size": ("vocab_size", "int", ..., "rows of the embedding"),
    "max-position-embeddings": ("max_position_embeddings", "int", ..., "positions the model was made for"),
}

TRAINER_ONLY = {
    # Megatron-LM's name of what is no field of megatron-core's, but which vime's trainer reads: (key, kind, help)
    "make-vocab-size-divisible-by": ("make_vocab_size_divisible_by", "int", "pad the embedding's rows to a multiple"),
    "num-layers-per-virtual-pipeline-stage": (
        "num_layers_per_virtual_pipeline_stage",
        "int",
        "layers of each virtual stage: --num-virtual-stages-per-pipeline-rank said the other way round",
    ),
}

_FIXED = {
    "variable_seq_lengths": "vime always packs sequences of different lengths",
    "transformer_impl": "vime builds the layers itself, on torch",
    "test_mode": "it is for Megatron's own tests",
    "config_logger_dir": "the resolved settings are in the run folder",
}

_BINARY = {ast.Pow: operator.pow, ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub}
UNKNOWN = object()
"""Default of a field whose value cannot be read without running Megatron's code."""


@dataclass(frozen=True, slots=True)
class MegatronField:
    """One dataclass field as its source states it."""

    name: str
    config: str
    annotation: str
    default: Any
    help: str
    spelling: str | None
    """Megatron-LM's flag, where the source names one."""


def megatron_flags() -> dict[str, Flag]:
    """Every Megatron flag, by name. Raises: ConfigError when megatron-core is not installed."""
    flags: dict[str, Flag] = {}
    by_field: dict[str, Flag] = {}
    ours = {flag.key.split(".")[1] for flag in vime_flags().values()}
    renamed = {field: name for name, (field, value) in ALIASES.items() if value is ...}
    for field in megatron_fields():
        shape = _shape(field.annotation)
        if field.name.startswith("_") or field.name in ours or field.name in by_field or shape is None:
            continue
        kind, is_list, is_optional, choices = shape
        spelling = field.spelling or renamed.get(field.name) or field.name.replace("_", "-")
        flag = Flag(
            name=spelling,
            owner="megatron",
            key=field.name,
            kind=kind,
            is_list=is_list,
            is_optional=is_optional or field.default is None,
            choices=choices,
            default=None if field.default is UNKNOWN else field.default,
            help=field.help,
            group=field.config,
            value=False if kind == "bool" and spelling.startswith(("no-", "disable-")) else None,
            refusal=_FIXED.get(field.name, ""),
        )
        by_field[field.name] = flags[spelling] = flag
        core_name = field.name.replace("_", "-")
        if core_name != spelling:
            flags[core_name] = replace(flag, name=core_name, value=None, refusal=f"Megatron-LM calls it --{spelling}")
    for name, (key, value) in ALIASES.items():
        if key not in by_field:
            raise ConfigError(f"megatron-core has no field {key}, which --{name} is an alias of; vime needs 0.16.1")
        if value is not ...:
            flags[name] = replace(by_field[key], name=name, kind="bool", choices=(), value=value, refusal="")
    for name, (key, kind, value, text) in CHECKPOINT_ONLY.items():
        flags[name] = Flag(
            name=name,
            owner="megatron",
            key=key,
            kind=kind,
            help=f"{text} (from the checkpoint; must agree with it)",
            group="Model",
            value=None if value is ... else value,
        )
    for name, (key, kind, text) in TRAINER_ONLY.items():
        flags[name] = Flag(
            name=name, owner="megatron", key=key, kind=kind, is_optional=False, help=text, group="Trainer"
        )
    return flags


def megatron_fields() -> Iterator[MegatronField]:
    """The fields of `SOURCES`, in source order; a name may come twice (bf16 is the model's and the optimizer's)."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:  # not even the package around it
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError("Megatron's flags need megatron-core, which is not installed; pip install megatron-core")
    root = Path(spec.origin).parent
    for path, name in SOURCES:
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        if not found:
            raise ConfigError(f"this megatron-core has no {name} in {path}; vime needs 0.16.1")
        yield from _class_fields(found[0])


def _class_fields(cls: ast.ClassDef) -> Iterator[MegatronField]:
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        doc = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            doc = inspect.cleandoc(after.value.value)
        default, spelling = _default(node.value)
        yield MegatronField(node.target.id, cls.name, ast.unparse(node.annotation), default, doc, spelling)


def _default(node: ast.expr | None) -> tuple[Any, str | None]:
    """A field's default and the flag name in its metadata."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field"):
        return _constant(node), None
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    spelling = None
    if "metadata" in given:
        meta = _constant(given["metadata"])
        names = meta.get("argparse_meta", {}).get("arg_names", []) if isinstance(meta, dict) else []
        spelling = names[0].removeprefix("--") if names else None
    factory = given.get("default_factory")
    if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
        return ([] if factory.id == "list" else {}), spelling
    return _constant(given.get("default")), spelling


def _constant(node: ast.expr | None) -> Any:
    """The value of a literal or of arithmetic on literals (2**32); UNKNOWN for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _constant(node.left), _constant(node.right)
        return UNKNOWN if UNKNOWN in (left, right) else _BINARY[type(node.op)](left, right)
    try:
        return ast.literal_eval(node) if node is not None else UNKNOWN
    except ValueError:
        return UNKNOWN


def _shape(annotation: str) -> tuple[str, bool, bool, tuple[Any, ...]] | None:
    """An annotation's source as (kind, is_list, is_optional, choices); None where no text can express it."""
    is_optional = annotation.startswith("Optional[")
    if is_optional:
        annotation = annotation[len("Optional[") : -1]
    if annotation in ("int", "float", "str", "bool"):
        return annotation, False, is_optional, ()
    if annotation.startswith("Literal["):
        return "str", False, is_optional, ast.literal_eval(f"({annotation[len('Literal[') : -1]},)")
    if annotation.lower() in ("list[int]", "list[float]", "list[str]"):
        return annotation[len("List[") : -1], True, is_optional, ()
    if annotation in ("Union[int, List[int]]", "Union[float, List[float]]"):
        return "json", False, is_optional, ()
    if annotation.startswith("Union[str, ") and "CudaGraphScope" not in annotation:
        return "any", False, is_optional, ()
    return None
