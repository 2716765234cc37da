"""Training checkpoints through megatron-core's dist_checkpointing: resumable on another number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from vime.errors import ConfigError, TrainingError, VimeError
from vime.trainer.megatron import parallel
from vime.trainer.megatron.checkpoints import plain_pickles
from vime.trainer.megatron.checkpoints.gathered_state import is_shared
from vime.trainer.megatron.checkpoints.own_state import OPTIMIZER_STATE, OwnState, merged_in_place
from vime.trainer.megatron.checkpoints.saving import Save
from vime.trainer.megatron.checkpoints.stored_tensors import StoredTensors
from vime.trainer.megatron.nn.model import Policy, single_optimizers
from vime.trainer.megatron.weights.host_weights import HostWeights

_log = logging.getLogger(__name__)

CRITIC = "critic."
"""How the keys of all of a critic's begin; what follows is as the policy's."""
REFERENCE = "reference."
"""How the keys of a reference's weights begin."""


def begin_save(
    policy: Policy,
    path: Path,
    *,
    counters: dict[str, int],
    with_optimizer: bool,
    in_background: bool,
    critic: Policy | None = None,
    reference: HostWeights | None = None,
) -> Save:
    """Start to write a checkpoint folder; under its final name it is always whole. Collective.

    Args:
        counters: plain numbers to come back from `load`.
        in_background: return when the state is copied, not when it is written.
        critic, reference: go into the same checkpoint.
    """
    state = {**_state(policy, with_optimizer=with_optimizer, is_loading=False), "counters": counters}
    if with_optimizer:
        state["random"] = _random_object(_random_state())
        state["layout"] = _layout()
    if critic is not None:
        state |= _critic_state(critic, with_optimizer=with_optimizer)
    if reference is not None:
        state["reference"] = _kept_state(policy, reference)
        add_prefix_for_sharding(state["reference"], REFERENCE)
        state["has_reference"] = True
    # State that is gathered from several ranks is in new tensors on the host; otherwise it is what is trained with.
    return Save(state, path, in_background=in_background, fresh_prefix=_fresh(policy))


def begin_save_critic(critic: Policy, path: Path, *, with_optimizer: bool, in_background: bool) -> Save:
    """Start to write the critic of ranks of its own, under the keys that one beside the policy has. Collective."""
    state = _critic_state(critic, with_optimizer=with_optimizer)
    return Save(state, path, in_background=in_background, fresh_prefix=_fresh(critic))


def critic_folder(path: Path) -> Path:
    """Where a checkpoint has the critic of ranks of its own. Args: path: of the trainer's part."""
    return path.with_name("critic")


def _critic_state(critic: Policy, *, with_optimizer: bool) -> dict[str, Any]:
    state = _state(critic, with_optimizer=with_optimizer, is_loading=False)
    add_prefix_for_sharding(state, CRITIC)
    return {"critic": state, "has_critic": True}


def _fresh(trained: Policy) -> tuple[str, ...]:
    is_copy = trained.has_distributed_optimizer and all(map(is_shared, single_optimizers(trained.optimizer)))
    return (OPTIMIZER_STATE, CRITIC + OPTIMIZER_STATE) if is_copy else ()


def load(
    policy: Policy,
    path: Path,
    *,
    with_optimizer: bool,
    critic: Policy | None = None,
    reference: HostWeights | None = None,
) -> dict[str, int]:
    """Restore what `save` wrote; returns its counters. Collective.

    Args:
        critic: restored, too, if the checkpoint has one; see `load_critic`.
        reference: becomes the checkpoint's, if that has one.
    Raises: ConfigError if the folder is not a checkpoint, or holds no optimizer or critic where one is wanted;
        TrainingError if it cannot be read.
    """
    saved = _common(path)
    if with_optimizer and "scheduler" not in saved:
        raise ConfigError(f"{path} was saved with --no-save-optim; add --no-load-optim to resume its weights alone")
    if critic is not None:
        load_critic(critic, path, with_optimizer=with_optimizer)
    if reference is not None and saved.get("has_reference"):
        with reference.in_place():
            _load_weights(policy, path, REFERENCE)
    same_layout = saved.get("layout") == _layout()
    wanted = _state(policy, with_optimizer=with_optimizer, is_loading=True)
    own = _own_states(policy, wanted, "") if with_optimizer else []
    if with_optimizer and same_layout:
        wanted["random"] = _random_object(None)
    with _readable(path):
        state = dist_checkpointing.load(wanted, str(path))
    _restore(policy, state, saved, path, own, with_optimizer=with_optimizer)
    if with_optimizer:
        if same_layout:
            _set_random_state(state["random"])
        elif dist.get_rank() == 0:
            # Each tensor-parallel rank and stage has a stream of its own, so other ranks cannot go on with them.
            _log.warning(
                "%s was saved with %s, and this run has %s: random streams start from --seed again",
                path,
                _described(saved.get("layout")),
                _described(_layout()),
            )
    counters: dict[str, int] = saved["counters"]
    return counters


def load_critic(critic: Policy, path: Path, *, with_optimizer: bool) -> None:
    """Restore the critic of a checkpoint, whichever ranks it was on then, and is on now. Collective.

    If the checkpoint has none, weights alone can be loaded, and the critic stays as it is.

    Args: path: of the trainer's part of the checkpoint.
    Raises: ConfigError if there is none and its optimizer is wanted, or was not saved; TrainingError if it cannot be
        read.
    """
    folder = critic_folder(path) if critic_folder(path).is_dir() else path
    saved = _common(folder)
    if not saved.get("has_critic"):
        if with_optimizer:
            raise ConfigError(f"{path} has no critic; add --finetune to begin with its policy and a new critic")
        return
    if with_optimizer and "scheduler" not in saved["critic"]:
        raise ConfigError(f"{folder} was saved with --no-save-optim; add --no-load-optim to resume its weights alone")
    wanted = _state(critic, with_optimizer=with_optimizer, is_loading=True)
    own = _own_states(critic, wanted, CRITIC) if with_optimizer else []
    add_prefix_for_sharding(wanted, CRITIC)
    with _readable(folder):
        state = dist_checkpointing.load({"critic": wanted}, str(folder))
    _restore(critic, state["critic"], saved.get("critic", {}), folder, own, with_optimizer=with_optimizer)


def _common(path: Path) -> dict[str, Any]:
    """What a checkpoint has besides tensors. Raises: ConfigError if the folder is none."""
    with _readable(path):
        if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
            raise ConfigError(f"{path} is not a training checkpoint")
        plain_pickles.check(path)
        saved: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))
    return saved


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What torch and Megatron raise on damaged files, of a dozen kinds and with tracebacks in it, as one error."""
    try:
        yield
    except VimeError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        first_line = (str(cause).splitlines() or [""])[0]
        raise TrainingError(f"{path} cannot be read ({type(cause).__name__}: {first_line})") from error


@contextmanager
def _readable_by_all(path: Path) -> Iterator[None]:
    """The same around what each rank reads by itself: if one cannot, none goes on. Collective."""
    own: VimeError | None = None
    try:
        with _readable(path):
            yield
    except VimeError as error:
        own = error
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if own is None else str(own))
    if own is not None:
        raise own
    if others := [reason for reason in reasons if reason is not None]:
        raise TrainingError(others[0])


def _stored(path: Path, own: Sequence[tuple[OwnState, str]]) -> StoredTensors:
    """The checkpoint, which has all that this rank needs. Collective."""
    with _readable_by_all(path):
        stored = StoredTensors(path)
        for part, prefix in own:
            part.check(stored, prefix=prefix)
        return stored


def _restore(
    policy: Policy,
    state: Mapping[str, Any],
    saved: Mapping[str, Any],
    path: Path,
    own: Sequence[tuple[OwnState, str]],
    *,
    with_optimizer: bool,
) -> None:
    """Put loaded weights, optimizer and schedule in place.

    Args:
        saved: what is no tensor of it.
        path: of the checkpoint that has its parts.
        own: what this rank reads of the optimizer by itself.
    """
    stored = _stored(path, own) if own else None
    for key, ddp in zip(_model_keys(policy), policy.ddps, strict=True):
        ddp.module.load_state_dict(state[key])
    if not with_optimizer:
        policy.optimizer.reload_model_params()
        return
    with _own_settings(policy.optimizer):
        # Of distributed optimizers without the tensors, which are read when these are allocated.
        policy.optimizer.load_state_dict(state["optimizer"])
    policy.scheduler.load_state_dict(saved["scheduler"])
    if stored is not None:
        with _readable_by_all(path):
            for part, prefix in own:
                part.read(stored, prefix=prefix)


def _load_weights(policy: Policy, path: Path, prefix: str) -> None:
    """Into the model, and nothing else. Args: prefix: of their keys in the checkpoint."""
    wanted = _state(policy, with_optimizer=False, is_loading=True)
    add_prefix_for_sharding(wanted, prefix)
    with _readable(path):
        state = dist_checkpointing.load(wanted, str(path))
    for key, ddp in zip(_model_keys(policy), policy.ddps, strict=True):
        ddp.module.load_state_dict(state[key])


def _kept_state(policy: Policy, weights: HostWeights) -> dict[str, Any]:
    """A model's state with other weights than it has now."""
    state = _state(policy, with_optimizer=False, is_loading=False)
    return {
        key: {name: replace(entry, data=weights.kept(entry.data)) for name, entry in model.items()}
        for key, model in state.items()
    }


def _own_states(policy: Policy, state: Mapping[str, Any], prefix: str) -> list[tuple[OwnState, str]]:
    """What is read of its optimizer apart from the rest, with the prefix of the keys; nothing of one that all share."""
    if not policy.has_distributed_optimizer:
        return []
    return [(OwnState(policy.optimizer, {key: state[key] for key in _model_keys(policy)}), prefix)]


def _state(policy: Policy, *, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    metadata = {
        # The one optimizer format of 0.16.1 that can be read by another number of ranks.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        key: _without_extra_state(ddp.module.sharded_state_dict(metadata=metadata))
        for key, ddp in zip(_model_keys(policy), policy.ddps, strict=True)
    }
    if is_loading:
        for model in map(state.__getitem__, _model_keys(policy)):
            model.update({name: merged_in_place(entry) for name, entry in model.items()})
    if with_optimizer:
        models = dict(state) if len(policy.ddps) > 1 else state["model"]
        state["optimizer"] = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        if not is_loading:
            state["scheduler"] = policy.scheduler.state_dict()
    return state


def _model_keys(policy: Policy) -> list[str]:
    """Where a state has each model chunk; the names in the files do not depend on it."""
    return ["model"] if len(policy.ddps) == 1 else [f"model{i}" for i in range(len(policy.ddps))]


def _without_extra_state(model: dict[str, Any]) -> dict[str, Any]:
    """Without what megatron-core's layers have for transformer-engine, which is nothing in each of them."""
    return {name: entry for name, entry in model.items() if not name.endswith("._extra_state")}


def _layout() -> dict[str, int]:
    """The sizes that random streams depend on."""
    return {"tensor": parallel.tp_size(), "pipeline": parallel.pp_size()}


def _described(layout: Mapping[str, int] | None) -> str:
    if layout is None:
        return "an unknown layout"
    return f"{layout['tensor']} tensor-parallel ranks and {layout['pipeline']} pipeline stages"


def _random_object(state: dict[str, Any] | None) -> ShardedObject:
    """One entry per tensor-parallel rank and stage; the others of a rank's kind have the same."""
    return ShardedObject(
        "random",
        state,
        (parallel.pp_size(), parallel.tp_size()),
        (parallel.pp_rank(), parallel.tp_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


@contextmanager
def _own_settings(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Keep this run's learning rates, betas and so on, which a loaded optimizer would bring along."""
    before = [{name: group[name] for name in group if name not in _STATE} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)


_STATE = ("params", "step")  # of a parameter group; everything else in it is a setting


def _random_state() -> dict[str, Any]:
    """Equal on all data- and context-parallel ranks: they are seeded alike, and nothing in a step draws."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
