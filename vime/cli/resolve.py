"""argv to the one resolved, checked, frozen configuration, with the origin of every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vime.cli.checkpoint_files import check_checkpoint_files
from vime.cli.flag import Flag
from vime.cli.help import print_help
from vime.cli.parse import Catalogue, Parsed, parse
from vime.cli.vime_flags import section_classes
from vime.config import Config, estimators
from vime.config.dtype import training_dtype_problem
from vime.config.hf import local_checkpoint, read_model_config
from vime.config.modes import engines_return_experts, trains
from vime.config.validate import Facts, validate
from vime.config.validate_cluster import engine_devices
from vime.errors import ConfigError
from vime.models import family_of

if TYPE_CHECKING:
    from vime.platform.base import Platform

DEFAULT, CHECKPOINT, PLATFORM = "default", "HF checkpoint", "platform"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that passed every check."""

    config: Config
    origin: dict[str, str]
    """By flag name without dashes: "default", "--config x.yaml", "command line", "HF checkpoint" or "platform"."""
    shape: dict[str, Any]
    """The model's architecture in Megatron's names, as the checkpoint states it."""


def resolve(argv: Sequence[str], *, fetch: bool = True, here: bool = True, overlapped: bool | None = None) -> Resolved:
    """Parse, fill in, cross-check. A `--help…` flag prints its table and exits.

    Args:
        argv: the words after the program's name.
        fetch: download a hub checkpoint, put its local folder in place of the name, and check that it is whole.
        here: whether the run is for this machine. If not, neither its devices nor its files of prompts count, and the
            platform is CUDA's unless another is named.
        overlapped: whether it is for train_async.py; None: for the program that can run it.
    Raises: ConfigError with every problem found.
    """
    print_help(argv)
    catalogue = Catalogue()
    parsed = parse(argv, catalogue)
    if parsed.unread:
        raise ConfigError(parsed.problems)
    config = build_config(parsed)
    problems = list(parsed.problems)
    platform = _platform(config, problems, here=here)
    model, shape = _checkpoint(config, problems)
    claims = tuple(
        (g.flag.name, g.flag.key, g.value)
        for g in parsed.given.values()
        if g.flag.owner == "megatron" and (g.flag.group == "Model" or g.flag.key in shape)
    )
    facts = _facts(config, platform, parsed, model, shape, claims)
    facts = replace(facts, overlapped=config.stream.fully_async if overlapped is None else overlapped)
    if not here:
        facts = replace(facts, devices=None, reads_prompt_files=False)
    misread = {_name_in(problem) for problem in parsed.problems}
    # A required setting whose value was refused is not also missing.
    problems += [p for p in validate(config, facts) if not (_name_in(p) in misread and "is required" in p)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    origin = {flag.name: DEFAULT for flag in catalogue.table("vime").values()}
    for given in parsed.given.values():
        origin[given.flag.name] = origin[catalogue.canonical(given.flag).name] = given.origin
    config = _fill(config, platform, model, origin)
    if fetch:
        folder = local_checkpoint(config.checkpoint.hf_checkpoint)
        check_checkpoint_files(config, folder, model)
        config = replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(folder)))
    origin |= {name.replace("_", "-"): CHECKPOINT for name in shape if name.replace("_", "-") not in origin}
    return Resolved(config, origin, shape)


def build_config(parsed: Parsed) -> Config:
    """What was given, in its sections; everything else at its default."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in section_classes()}
    others: dict[str, Any] = {"megatron": {}, "vllm": {}, "router": {}}
    for given in parsed.given.values():
        flag: Flag = given.flag
        if flag.owner == "vime":
            section, name = flag.key.split(".")
            sections[section][name] = given.value
        elif flag.group != "Model":  # those describe the checkpoint and are no fields of megatron-core's
            others[flag.owner][flag.key] = given.value
    made: dict[str, Any] = {name: cls(**sections[name]) for name, cls in section_classes().items()}
    return Config(**made, **others)


def _platform(config: Config, problems: list[str], *, here: bool) -> Platform | None:
    from vime.platform import get_platform

    name = config.cluster.platform
    try:
        return get_platform(name if here or name != "auto" else "cuda")
    except ConfigError as error:
        problems += error.problems
        return None


def _checkpoint(config: Config, problems: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint's config.json, and its architecture in Megatron's names; empty when there is a problem."""
    if not config.checkpoint.hf_checkpoint:
        return {}, {}
    try:
        model = read_model_config(config.checkpoint.hf_checkpoint)
        settings = family_of(model).settings(model)
        if trains(config) and (problem := training_dtype_problem(config.megatron, model)):
            problems.append(problem)
    except ConfigError as error:
        problems += error.problems
        return {}, {}
    shape = dict(settings.transformer)
    for name in ("hidden_dropout", "attention_dropout", "init_method_std"):
        shape.pop(name, None)
    groups, heads = shape["num_query_groups"], shape["num_attention_heads"]
    shape |= {
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": settings.max_position_embeddings,
        "rotary_base": settings.rotary_base,
        "rotary_percent": settings.rotary_percent,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "group_query_attention": groups != heads,
        "swiglu": bool(shape.get("gated_linear_unit")) and shape.get("activation_func") == "silu",
        "untie_embeddings_and_output_weights": not settings.tie_word_embeddings,
    }
    shape.setdefault("num_moe_experts", None)
    shape.setdefault("qk_layernorm", False)
    return model, shape


def _facts(
    config: Config,
    platform: Platform | None,
    parsed: Parsed,
    model: Mapping[str, Any],
    shape: Mapping[str, Any],
    claims: tuple[tuple[str, str, Any], ...],
) -> Facts:
    from vime.observability.metrics import name_problem
    from vime.rewards import REMOTE, REWARD_NAMES, REWARDS
    from vime.trainer.megatron.patches.limits import limits

    has_experts = not shape or shape["num_moe_experts"] is not None
    limited = platform is not None and platform.device_type != "cpu" and config.cluster.ray_address is None
    return Facts(
        platform=platform.name if platform is not None else config.cluster.platform,
        transports=tuple(platform.transports) if platform is not None else ("shm", "gloo", "disk"),
        turns_problem=platform.turns_problem if platform is not None else None,
        devices=platform.device_count() if platform is not None and limited else None,
        reward_names=REWARD_NAMES,
        rewards_without_label=(*REMOTE, *(name for name, spec in REWARDS.items() if not spec.needs_label)),
        explicit=frozenset(g.flag.key for g in parsed.given.values() if g.flag.owner == "vime"),
        shape=shape,
        max_position_embeddings=shape.get("max_position_embeddings") if model else None,
        head_sizes=platform.engine_head_sizes if platform is not None else None,
        shape_claims=claims,
        metric_problem=name_problem,
        routed_experts_problem=_routed_experts_problem(config, platform),
        megatron_limits={
            name: limit for name, limit in limits(config.megatron, has_experts=has_experts).items() if name not in shape
        },
    )


def _routed_experts_problem(config: Config, platform: Platform | None) -> str | None:
    """Why engines cannot return routed experts here; not looked into where nobody wants them."""
    from vime.engine.vllm.versions import adapter_for

    if platform is None or not engines_return_experts(config):
        return None
    try:
        return adapter_for().routed_experts_problem(platform.device_type)
    except ModuleNotFoundError:  # settings may be looked at where no engine will run; a run says what is not installed
        return None


def _fill(config: Config, platform: Platform | None, model: Mapping[str, Any], origin: dict[str, str]) -> Config:
    """Put the value in place of every "default: as that other setting", so that the printed value is the one used."""
    assert platform is not None, "a platform that cannot be found is a problem, and problems are raised before"
    from vime.rewards.score import default_reward_keys

    changes: dict[str, dict[str, Any]] = {}

    def fill(section: str, name: str, value: Any, where: str = DEFAULT) -> None:
        if getattr(getattr(config, section), name) in (None, "auto"):
            changes.setdefault(section, {})[name] = value
            origin[name.replace("_", "-")] = where

    rollout, algo, cluster = config.rollout, config.algo, config.cluster
    fill("cluster", "platform", platform.name, PLATFORM)
    if not cluster.rollout_external_engine_addrs:
        fill("cluster", "rollout_num_gpus", engine_devices(cluster))
    positions = model["max_position_embeddings"]
    fill("rollout", "rollout_max_context_len", positions, CHECKPOINT)
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    fill("train", "global_batch_size", samples // (config.train.num_steps_per_rollout or 1))
    fill("algo", "eps_clip_high", algo.eps_clip)
    fill("algo", "pg_loss_type", estimators.pg_loss_type(algo))
    fill("algo", "loss_agg_mode", estimators.loss_agg_mode(algo))
    fill("algo", "loss_agg_length", rollout.rollout_max_response_len)
    fill("algo", "kl_loss_type", estimators.kl_type(algo))
    fill("eval", "eval_temperature", rollout.rollout_temperature)
    fill("eval", "eval_top_p", rollout.rollout_top_p)
    fill("eval", "eval_top_k", rollout.rollout_top_k)
    fill("eval", "eval_max_response_len", rollout.rollout_max_response_len)
    fill("eval", "eval_max_context_len", rollout.rollout_max_context_len or positions)
    fill("eval", "eval_input_key", config.data.input_key)
    fill("eval", "eval_label_key", config.data.label_key)
    fill("eval", "eval_tool_key", config.data.tool_key)
    reward_key, eval_reward_key = default_reward_keys(config.reward)
    fill("reward", "reward_key", reward_key)
    fill("eval", "eval_reward_key", eval_reward_key)
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in changes.items()})


def _name_in(problem: str) -> str:
    """The flag a problem begins with, to tell "is missing" from "was refused"."""
    word = problem.split()[0] if problem else ""
    return word.removeprefix("--").replace("_", "-")


def as_mapping(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dicts, ready for JSON or YAML."""
    return dataclasses.asdict(config)


__all__ = ["CHECKPOINT", "DEFAULT", "PLATFORM", "Resolved", "as_mapping", "resolve"]
