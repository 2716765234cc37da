"""`vime plan`: what a configuration takes of each training device's memory, before any device is there."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vime.cli.parse import Catalogue, parse
from vime.cli.resolve import build_config
from vime.config import Config
from vime.config.critic_ranks import critic_layout, critic_ranks
from vime.config.dtype import run_dtype, training_dtype_problem
from vime.config.hf import read_model_config
from vime.config.modes import generates, trains
from vime.config.parallel import parallel_sizes
from vime.config.ranges import check_ranges
from vime.config.validate import refuse_what_the_trainer_cannot_do
from vime.config.validate_cluster import training_ranks
from vime.config.validate_recompute import check_recompute, stage_layers
from vime.config.validate_sharing import check_sharing
from vime.errors import ConfigError
from vime.models import ModelSettings, family_of
from vime.models.division import Division
from vime.models.memory import GIB, DeviceMemory, Engine, Training, engine_cache_tokens, engine_room_bytes, estimate
from vime.models.parameters import parameters
from vime.models.run_memory import critic_memory, division_of, need_of, training_of, wishes_of
from vime.models.sharing import ASLEEP_BYTES, Sharing, allowed_ways, decide

_UTILIZATION = 0.92  # vLLM's own default
_MOST_GIB, _MOST_DEVICES = 1e6, 100_000  # more is a slip of the pen


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration's memory."""

    model: ModelSettings
    division: Division
    training: Training
    devices: tuple[DeviceMemory, ...]
    """One of each pipeline rank."""
    engine: Engine | None
    """None without engines, or where the devices' memory is not stated."""
    sharing: Sharing | None
    """How trainer and engines share devices; None where they have their own."""
    refusal: str | None
    """Why they cannot share them; None where they can."""
    ranks_per_node: int
    notes: tuple[str, ...] = ()
    """What a user may not have meant, in sentences."""
    critic_devices: tuple[DeviceMemory, ...] = ()
    """Of a critic on devices of its own, one of each of its pipeline ranks."""

    @property
    def host_bytes(self) -> int:
        """Host memory that a training node's ranks take; engines are not in it."""
        return self.ranks_per_node * max(d.host_bytes for d in self.devices)

    def problems(self, device_bytes: int | None, host_bytes: int | None = None) -> list[str]:
        """What does not fit, in sentences."""
        found = [] if self.refusal is None else [self.refusal]
        fullest = max(self.devices, key=lambda d: d.total)
        if device_bytes is not None and fullest.total > device_bytes:
            found.append(
                f"a device of pipeline rank {fullest.pipeline_rank} needs {_gib(fullest.total)} GiB, "
                f"{_gib(fullest.total - device_bytes)} GiB more than it has"
            )
        fullest = max(self.critic_devices, key=lambda d: d.total, default=fullest)
        if device_bytes is not None and self.critic_devices and fullest.total > device_bytes:
            found.append(
                f"a device of the critic's own needs {_gib(fullest.total)} GiB, "
                f"{_gib(fullest.total - device_bytes)} GiB more than it has"
            )
        if host_bytes is not None and self.host_bytes > host_bytes:
            found.append(
                f"a training node needs {_gib(self.host_bytes)} GiB of host memory, but has {_gib(host_bytes)} GiB"
            )
        if self.engine is not None:
            tokens = engine_cache_tokens(self.model, self.engine, self.training.dtype)
            room = engine_room_bytes(self.model, self.engine, self.training.dtype)
            if self.engine.cache_bytes is not None and self.engine.cache_bytes > room:
                found.append(
                    f"--vllm-kv-cache-memory-bytes is {_gib(self.engine.cache_bytes)} GiB, but an engine's share of "
                    f"{self.engine.utilization:g} leaves {_gib(max(room, 0))} GiB"
                )
            if tokens < self.engine.max_model_len:
                found.append(
                    f"an engine's share of {self.engine.utilization:g} leaves a KV cache of {max(tokens, 0)} tokens, "
                    f"but a sequence may have {self.engine.max_model_len}"
                )
        return found


def run(argv: Sequence[str]) -> int:
    """`vime plan [--device-memory-gib G] [settings]`. Returns: 0 fits or nothing to compare with, 1 does not fit."""
    own, words = _own_arguments(argv)
    device, host = _bytes(own, "device_memory_gib"), _bytes(own, "host_memory_gib")
    for name in ("devices_per_node", "nodes"):
        if (count := getattr(own, name)) is not None and not 1 <= count <= _MOST_DEVICES:
            raise ConfigError(f"--{name.replace('_', '-')} is {count}, but must be from 1 to {_MOST_DEVICES}")
    config, model, dtype = _read(words)
    if own.devices_per_node is not None:
        from vime.cli.on_cluster import resolve_on

        resolve_on(words, nodes=own.nodes, devices_per_node=own.devices_per_node)
    plan = make_plan(config, model, dtype, device_bytes=device)
    problems = plan.problems(device, host)
    print(_as_json(plan, problems) if own.json else "\n".join(_table(plan, device)))
    if not own.json:
        for problem in problems:
            print(f"does not fit: {problem}")
        if device is not None and not problems:
            fullest = max(d.total for d in (*plan.devices, *plan.critic_devices))
            print(f"fits: {_gib(device - fullest)} GiB are left on the fullest device")
    return 1 if problems else 0


def make_plan(config: Config, model: ModelSettings, dtype: str, *, device_bytes: int | None) -> Plan:
    """The memory of a configuration.

    Args:
        dtype: of training and serving.
        device_bytes: memory of one device; without it an engine's share of a device is not known.
    Raises: ConfigError if the ranks do not divide the model, or engines share devices of unknown memory.
    """
    world = training_ranks(config)
    problems = list(parallel_sizes(config.megatron).problems(world, model.transformer))
    if (own := critic_ranks(config)) is not None:
        sizes = parallel_sizes(critic_layout(config.megatron, config.critic))
        problems += [f"the critic's {own.total} ranks: {p}" for p in sizes.problems(own.total, model.transformer)]
    problems += check_recompute(config, model.transformer, stage_layers(config, model.transformer))
    if problems:
        raise ConfigError(problems)
    colocated = config.cluster.colocate
    if device_bytes is None and colocated and generates(config):
        raise ConfigError("--device-memory-gib is required with --colocate: engines take a share of it")
    division, training = division_of(config, model, world), training_of(config, model, dtype)
    engine = sharing = refusal = None
    if device_bytes is not None and generates(config) and not config.cluster.rollout_external_engine_addrs:
        utilization = config.vllm.get("gpu_memory_utilization", _UTILIZATION)
        if colocated:
            allowed_ways(wishes_of(config))  # flags that contradict each other are no question of memory
            try:
                need = need_of(config, model, dtype, world_size=world, device_bytes=device_bytes)
                sharing = decide(need, wishes_of(config))
                utilization = sharing.utilization
            except ConfigError as error:
                refusal = str(error)
        engine = Engine(
            device_bytes=device_bytes,
            cache_bytes=config.vllm.get("kv_cache_memory_bytes"),
            utilization=utilization,
            tensor=config.cluster.rollout_num_gpus_per_engine,
            max_model_len=config.rollout.rollout_max_context_len or model.max_position_embeddings,
        )
    stays = sharing is None or not sharing.engines_sleep
    devices = estimate(model, division, training, engine if colocated and stays else None)
    if sharing is not None and sharing.engines_sleep:
        devices = [_in_turns(device, trainer_leaves=sharing.trainer_leaves) for device in devices]
    ranks_per_node, notes = config.cluster.actor_num_gpus_per_node, _notes(config, dtype)
    critic = tuple(critic_memory(config, model, dtype))
    return Plan(model, division, training, tuple(devices), engine, sharing, refusal, ranks_per_node, notes, critic)


def _notes(config: Config, dtype: str) -> tuple[str, ...]:
    if dtype != "float32" or config.megatron.get("bf16") is not None:
        return ()
    return ("planned in float32, which the checkpoint is stored in; with --bf16 the run would be in bfloat16",)


def _in_turns(device: DeviceMemory, *, trainer_leaves: bool) -> DeviceMemory:
    """A device whose engine sleeps at the fullest moment, and whose trainer has a place on the host to leave to."""
    away = sum(device.parts[name] for name in ("weights", "optimizer state"))
    return replace(
        device,
        parts={**device.parts, "engine": ASLEEP_BYTES},
        host_bytes=device.host_bytes + (away if trainer_leaves else 0),
    )


def _own_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="vime plan",
        description="Estimate the memory of each training device, part by part. Takes train.py's settings; "
        "--hf-checkpoint may also be a config.json. Exit code 1 when it does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument("--device-memory-gib", type=float, help="memory of one device")
    parser.add_argument("--host-memory-gib", type=float, help="memory of a training node")
    parser.add_argument(
        "--devices-per-node",
        type=int,
        help="of such nodes: also check every setting and the layout",
    )
    parser.add_argument("--nodes", type=int, default=1, help="how many of them (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    return parser.parse_known_args(list(argv))


def _bytes(own: argparse.Namespace, name: str) -> int | None:
    """Memory that is stated, in bytes. Raises: ConfigError if no device can have that."""
    gib: float | None = getattr(own, name)
    if gib is None:
        return None
    if not 0 < gib < _MOST_GIB:
        raise ConfigError(f"--{name.replace('_', '-')} is {gib:g}, but must be above 0 and below {_MOST_GIB:g}")
    return round(gib * GIB)


def _read(words: Sequence[str]) -> tuple[Config, ModelSettings, str]:
    """The settings, the model and the dtype of the run. Raises: ConfigError with all that is wrong."""
    from vime.trainer.megatron.patches.limits import limits

    parsed = parse(words, Catalogue())
    if parsed.problems:
        raise ConfigError(parsed.problems)
    config = build_config(parsed)
    checkpoint = config.checkpoint.hf_checkpoint
    if not checkpoint:
        raise ConfigError("--hf-checkpoint is required: an HF checkpoint folder, its config.json or a hub name")
    if os.path.basename(checkpoint) == "config.json" and os.path.isfile(checkpoint):
        checkpoint = str(Path(checkpoint).parent)
    hf = read_model_config(checkpoint)
    model = family_of(hf).settings(hf)
    all_limits = limits(config.megatron, has_experts="num_moe_experts" in model.transformer)
    known = {name: limit for name, limit in all_limits.items() if name not in model.transformer}
    problems = [
        *check_ranges(config),
        *refuse_what_the_trainer_cannot_do(config.megatron, known),
        *check_sharing(config, platform=config.cluster.platform, turns_problem=_turns_problem(config)),
    ]
    if trains(config) and (problem := training_dtype_problem(config.megatron, hf)):
        problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return (
        replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=checkpoint)),
        model,
        run_dtype(config.megatron, hf),
    )


def _turns_problem(config: Config) -> str | None:
    """Why trainer and engines cannot take turns on the devices planned for: CUDA's, unless another is named."""
    from vime.platform import get_platform

    name = config.cluster.platform
    return get_platform("cuda" if name == "auto" else name).turns_problem


def _table(plan: Plan, device_bytes: int | None) -> list[str]:
    """Lines: one row for each part, one column for each pipeline rank."""
    d = plan.division
    sizes = {"TP": d.tensor, "PP": d.pipeline, "CP": d.context, "DP": d.data, "EP": d.expert}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    lines = [
        f"{parameters(plan.model).total:,} parameters, {plan.training.dtype}; {d.world_size} training ranks: {layout}; "
        f"{plan.training.tokens} tokens a micro-batch",
        *plan.notes,
    ]
    lines += _rows(plan.devices, "GiB of one device", device_bytes)
    if plan.critic_devices:
        lines += _rows(plan.critic_devices, "GiB of a critic's device", device_bytes)
    lines.append(f"host memory of a training node: {_gib(plan.host_bytes)} GiB for {plan.ranks_per_node} ranks")
    if plan.engine is not None:
        tokens = engine_cache_tokens(plan.model, plan.engine, plan.training.dtype)
        how = plan.sharing or ("refused, see below" if plan.refusal else None)
        where = "of their own" if how is None else f"shared with the trainer ({how})"
        lines.append(f"engines on devices {where}: a KV cache of {max(tokens, 0):,} tokens each")
    return lines


def _rows(devices: Sequence[DeviceMemory], head: str, device_bytes: int | None) -> list[str]:
    """A row for each part, a column for each pipeline rank."""
    columns = "".join(f"{'pipeline ' + str(x.pipeline_rank):>14}" for x in devices)
    rows = []
    for name in devices[0].parts:
        rows.append((name, [device.parts[name] for device in devices]))
        if name == "working memory":
            moments = [device.moments for device in devices]
            rows += [(f"- {moment}", [m[moment] for m in moments]) for moment in moments[0]]
    rows.append(("total", [device.total for device in devices]))
    if device_bytes is not None:
        rows.append(("device memory", [device_bytes] * len(devices)))
    width = max(len(head), *(len(name) + 2 for name, _ in rows))
    return [
        head.ljust(width) + columns,
        *(
            "  " + name.ljust(width - 2) + "".join(f"{_gib(v):>14}" for v in values)
            for name, values in rows
            if any(values)
        ),
    ]


def _as_json(plan: Plan, problems: Sequence[str]) -> str:
    return json.dumps(
        {
            "parameters": parameters(plan.model).total,
            "division": asdict(plan.division),
            "training": asdict(plan.training),
            "devices": _devices_as_json(plan.devices),
            **({"critic_devices": _devices_as_json(plan.critic_devices)} if plan.critic_devices else {}),
            "host_bytes_per_node": plan.host_bytes,
            "notes": list(plan.notes),
            "problems": list(problems),
        },
        indent=2,
    )


def _devices_as_json(devices: Sequence[DeviceMemory]) -> list[dict[str, object]]:
    return [
        {
            "pipeline_rank": device.pipeline_rank,
            "parameters": device.parameters.total,
            "parts_bytes": dict(device.parts),
            "moments_bytes": dict(device.moments),
            "total_bytes": device.total,
        }
        for device in devices
    ]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"
