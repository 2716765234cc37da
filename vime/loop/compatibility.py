"""Whether a run may go on from a checkpoint: the settings it was written under against those of now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.config import Config
from vime.config.estimators import needs_critic
from vime.models import family_of

_FRESH = "start from its weights alone with --finetune"
_OTHER_GROUPS = "--apply-wd-to-qk-layernorm"  # puts parameters into another group of the optimizer's


def settings_to_keep(config: Config, hf_config: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """What a checkpoint says of its run's settings, JSON-ready.

    Args:
        hf_config: config.json of --hf-checkpoint.
        dtype: the weights', "float32" or "bfloat16".
    """
    megatron, train = config.megatron, config.train
    return {
        "model": _model(hf_config),
        "has_optimizer": not config.checkpoint.no_save_optim,
        "has_critic": needs_critic(config.algo),
        "fixed": {
            "dtype": dtype,
            "--loss-type": config.algo.loss_type,
            "--optimizer": megatron.get("optimizer", "adam"),
            **({_OTHER_GROUPS: True} if megatron.get("apply_wd_to_qk_layernorm") else {}),
        },
        "free": {
            **{f"--{n.replace('_', '-')}": _plain(megatron[n]) for n in _MEGATRON_FREE if n in megatron},
            "--lr-decay-style": train.lr_decay_style,
            "--lr-warmup-iters": train.lr_warmup_iters,
            "--lr-warmup-init": train.lr_warmup_init,
            "--lr-decay-iters": train.lr_decay_iters,
            "--num-rollout": config.rollout.num_rollout,
            "--num-epoch": config.rollout.num_epoch,
            "--global-batch-size": config.train.global_batch_size,
            "--rollout-batch-size": config.rollout.rollout_batch_size,
            "--n-samples-per-prompt": config.rollout.n_samples_per_prompt,
            **({"--ref-update-interval": every} if (every := config.algo.ref_update_interval) else {}),
        },
    }


def weights_to_keep(hf_config: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """What a checkpoint of weights alone says, that no run has written; JSON-ready."""
    return {
        "model": _model(hf_config),
        "has_optimizer": False,
        "has_critic": False,
        "fixed": {"dtype": dtype},
        "free": {},
    }


def _model(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    model = family_of(dict(hf_config)).settings(dict(hf_config))
    return {
        **{name: _plain(value) for name, value in sorted(model.transformer.items())},
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "rotary_base": model.rotary_base,
        **({"rotary_percent": model.rotary_percent} if model.rotary_percent != 1 else {}),
        **({"rope_scaling": dict(model.rope_scaling)} if model.rope_scaling else {}),
    }


_MEGATRON_FREE = ("lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")


def conflicts(saved: Mapping[str, Any], now: Mapping[str, Any], *, weights_only: bool) -> Iterator[str]:
    """Settings under which the checkpoint cannot be used, one sentence each.

    Args: weights_only: optimizer, scheduler and random state are not loaded.
    """
    # A checkpoint of a version without critics says nothing of one: it has none.
    if lost := sorted(set(now) - set(saved) - {"has_critic"}):
        yield f"its settings in state.json are damaged: {', '.join(lost)} missing"
        return
    yield from other_models(saved, now)
    for name, old, new in _changes(saved["fixed"], now["fixed"]):
        if name == "dtype":
            if weights_only:
                continue  # they are rounded, or widened, as those of --hf-checkpoint would be
            flag = "--no-bf16" if old == "float32" else "--bf16"
            yield f"the weights' dtype was {old} and is {new}; add {flag}, or {_FRESH}"
        elif name == _OTHER_GROUPS and not weights_only:
            what = f"saved with {name}; give it, too" if old else f"not saved with {name}; leave it out"
            yield f"it was {what}, or {_FRESH}"
        elif not weights_only:
            yield f"{name} was {old} and is {new}; use {old}, or {_FRESH}"
    if now["has_critic"] and not saved.get("has_critic") and not weights_only:
        yield f"it has no critic, which --advantage-estimator ppo trains; {_FRESH} and a new critic"
    if not saved["has_optimizer"] and not weights_only:
        yield "it was saved with --no-save-optim; add --no-load-optim to go on with its weights and counters"


def other_models(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """In what the two are of different architectures, one sentence each."""
    for name, old, new in _changes(saved["model"], now["model"]):
        yield f"the model's {name} was {old!r} and is {new!r} (--hf-checkpoint is of another architecture)"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that may differ from the checkpoint's and do, in words; those of now are used."""
    return [f"{name} {old} -> {new}" for name, old, new in _changes(saved["free"], now["free"])]


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in [*saved, *(n for n in now if n not in saved)]:
        if saved.get(name) != now.get(name):
            yield name, saved.get(name), now.get(name)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
