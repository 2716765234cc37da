"""Users' functions inside the trainer, for its tests; loaded by dotted path."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer

from vime.algo.policy_loss import clipped_loss
from vime.types import TrainBatch


def note(config, *what):
    """Remember a call in the folder that --run-dir names."""
    with (Path(config.config.log.run_dir) / "calls").open("a") as file:
        print(*what, file=file)


def init(config):
    note(config, "init", config.rank, config.world_size, torch.distributed.is_initialized())


def provider(config, pre_process, post_process, build):
    """The usual model with a frozen embedding."""
    note(config, "provider", pre_process, post_process)
    model = build()
    model.embedding.requires_grad_(False)
    return model


def provider_of_a_layer(config, pre_process, post_process, build):
    return torch.nn.Linear(1, 1)


def before_log_prob(config, model, store_prefix):
    note(config, "log_prob", repr(store_prefix), isinstance(model, torch.nn.Module))


def before_step(config, rollout_id, step_id, model, optimizer, scheduler):
    note(
        config,
        "step",
        rollout_id,
        step_id,
        isinstance(optimizer, MegatronOptimizer),
        optimizer.param_groups[0]["lr"] > 0,
    )


def zero_advantages(config, batch):
    """One number a sample."""
    assert np.isfinite(batch.extra["old_log_probs"][batch.loss_mask != 0]).all()
    return np.zeros(batch.num_samples)


def spread_advantages(config, batch):
    """One number a token; nothing is known of prompts."""
    return np.where(batch.loss_mask, np.repeat(batch.advantages, batch.lengths), np.nan)


def three_advantages(config, batch):
    return [1.0, 2.0, 3.0]


def advantage_with_a_bug(config, batch):
    return batch.no_such_column


def mask_first_sample(config, rollout_id, batch):
    """No gradient for the first sample."""
    mask = batch.loss_mask.copy()
    mask[: batch.lengths[0]] = 0
    return replace(batch, loss_mask=mask)


def mask_first_sample_and_weigh(config, rollout_id, batch):
    """The same with loss weights of its own, twice those of the tokens left."""
    masked = mask_first_sample(config, rollout_id, batch)
    return replace(masked, loss_weights=2 * masked.loss_weights * masked.loss_mask)


def unmask_prompts(config, rollout_id, batch):
    mask = np.ones_like(batch.loss_mask)
    mask[batch.cu_seqlens[:-1]] = 0
    return replace(batch, loss_mask=mask)


def other_tokens(config, rollout_id, batch: TrainBatch):
    return replace(batch, tokens=batch.tokens + 1)


def same_loss(config, inputs, sum_of_sample_mean):
    """The default loss, written as a user would."""
    result = clipped_loss(inputs.log_probs - inputs.old_log_probs, inputs.advantages, eps_clip=0.2)
    assert inputs.extra.keys() <= {"turns"}
    metrics = {"clipped": sum_of_sample_mean(result.clipped), "tokens": len(inputs.tokens)}
    return sum_of_sample_mean(result.loss), metrics


def loss_where_there_are_tokens(config, inputs, sum_of_sample_mean):
    """A micro-batch may be empty; this one then leads nowhere."""
    return sum_of_sample_mean(-inputs.log_probs) if len(inputs.tokens) else torch.tensor(0.0), {}


def loss_without_gradient(config, inputs, sum_of_sample_mean):
    return torch.tensor(1.0), {}


def geometric_weights(config, inputs):
    """`--tis-level geometric --tis-clip 1.2` by hand."""
    ratio = inputs.sequence_mean(inputs.old_log_probs - inputs.rollout_log_probs).exp()
    torch.testing.assert_close(
        inputs.sequence_sum(torch.ones_like(ratio)) * inputs.sequence_mean(ratio), inputs.sequence_sum(ratio)
    )
    metrics = {
        "cut": inputs.sum_of_sample_mean((ratio > 1.2).float()),
        "pg_loss": inputs.sum_of_sample_mean(inputs.pg_loss),
    }
    return ratio.clamp(max=1.2), metrics


def weights_of_nothing(config, inputs):
    """One weight too many."""
    return torch.ones(len(inputs.pg_loss) + 1), {}


def infinite_weights(config, inputs):
    """Of all but the first tokens."""
    weights = torch.ones_like(inputs.pg_loss)
    weights[:6] = torch.inf
    return weights, {}


def weights_alone(config, inputs):
    """No metrics."""
    return inputs.weights
