"""Checks of the settings against the model in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vime.config import Config
from vime.config.modes import generates
from vime.config.parallel import parallel_sizes


def check_model(
    config: Config,
    shape: Mapping[str, Any],
    claims: tuple[tuple[str, str, Any], ...],
    head_sizes: tuple[int, ...] | None = None,
) -> Iterator[str]:
    """Flags that describe the model must agree with it, and engines must be able to serve it.

    Args:
        shape: the checkpoint's architecture in Megatron's names; empty when it could not be read.
        claims: (flag, name in `shape`, value) of each flag that describes the model.
        head_sizes: that engines started here can take; None where that is no question.
    """
    if not shape:
        return
    for flag, name, value in claims:
        if name in shape and not _same(value, shape[name]):
            yield (
                f"--{flag} says {value}, but the checkpoint {config.checkpoint.hf_checkpoint} has {shape[name]}; "
                "leave the flag out: the checkpoint decides"
            )
    vocab_size = shape.get("vocab_size", math.inf)
    if outside := [i for i in config.rollout.rollout_stop_token_ids if not 0 <= i < vocab_size]:
        yield f"--rollout-stop-token-ids {outside[0]} is no token: the checkpoint's vocabulary has {vocab_size}"
    heads = shape["num_attention_heads"]
    size = config.cluster.rollout_num_gpus_per_engine
    if size > 1 and heads % size:
        yield f"--rollout-num-gpus-per-engine is {size}, which does not divide the model's {heads} attention heads"
    if generates(config) and not config.cluster.rollout_external_engine_addrs:
        yield from check_head_size(config, shape, head_sizes)


def check_head_size(config: Config, shape: Mapping[str, Any], sizes: tuple[int, ...] | None) -> Iterator[str]:
    """An engine would end with its first request. Args: as those of `check_model`."""
    width = shape.get("kv_channels")
    if sizes is not None and width is not None and width not in sizes:
        yield (
            f"the checkpoint {config.checkpoint.hf_checkpoint} has attention heads of {width} numbers (head_dim), but "
            f"engines on this platform take {', '.join(map(str, sizes))}; use another model, or another --platform"
        )


def check_lengths(config: Config, max_position_embeddings: int | None) -> Iterator[str]:
    """Prompt, response and context lengths against each other, the model and the token budget."""
    rollout, data, train = config.rollout, config.data, config.train
    response, prompt, context = (
        rollout.rollout_max_response_len,
        data.rollout_max_prompt_len,
        rollout.rollout_max_context_len,
    )
    if max_position_embeddings is not None and context is not None and context > max_position_embeddings:
        yield f"--rollout-max-context-len is {context}, but the model has {max_position_embeddings} positions"
    limit = context if context is not None else max_position_embeddings
    if config.algo.loss_type != "sft_loss" and limit is not None:
        named = "--rollout-max-context-len" if context is not None else "the model's positions,"
        if response >= limit:
            yield f"--rollout-max-response-len is {response}, which leaves no room for a prompt in {named} {limit}"
        elif prompt is not None and prompt + response > limit:
            yield (
                f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {response} = {prompt + response}, "
                f"above {named} {limit}"
            )
    if not train.use_dynamic_batch_size:
        return
    if train.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one forward pass of one rank"
        return
    longest, why = _longest_sample(config, limit)
    ranks = max(parallel_sizes(config.megatron).context, 1)
    for flag, tokens in (
        ("--max-tokens-per-gpu", train.max_tokens_per_gpu),
        ("--log-probs-max-tokens-per-gpu", train.log_probs_max_tokens_per_gpu),
    ):
        if tokens is not None and tokens * ranks < longest:
            by = f" on each of {ranks} context-parallel ranks" if ranks > 1 else ""
            yield f"{flag} is {tokens}{by}, but a sample may have {longest} tokens ({why}) and is never split"


def _longest_sample(config: Config, limit: int | None) -> tuple[int, str]:
    """Tokens of the longest sample that the settings are sure to allow, and where the number comes from."""
    response, prompt = config.rollout.rollout_max_response_len, config.data.rollout_max_prompt_len
    if config.algo.loss_type == "sft_loss":
        return 1, "its data decides"
    bounds = [(response + 1, "a prompt and --rollout-max-response-len")]
    if prompt is not None:
        bounds = [(prompt + response, "--rollout-max-prompt-len + --rollout-max-response-len")]
    elif config.rollout.rollout_max_context_len is not None:
        bounds = [(config.rollout.rollout_max_context_len, "--rollout-max-context-len")]
    if limit is not None:
        bounds.append((limit, "the context"))
    return min(bounds)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)
