"""The policy as a Megatron model: tokens in, log-probs and entropy out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from vime.config import TrainConfig
from vime.models import ModelSettings
from vime.models.memory import default_chunk_size
from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.packing import Packed
from vime.trainer.megatron.losses.log_probs import VocabularyShard, chunked_log_probs
from vime.trainer.megatron.nn.compiled import compiler_works
from vime.trainer.megatron.nn.experts import keep_router_bias_in_float32
from vime.trainer.megatron.nn.layers import block_spec
from vime.trainer.megatron.nn.rows import take_rows
from vime.trainer.megatron.optimizers import fused_optimizer
from vime.trainer.megatron.settings import MegatronSettings


def gpt_arguments(model: ModelSettings, settings: MegatronSettings, chunk: int) -> dict[str, Any]:
    """What a GPTModel is made of, but for the tie of embedding and head.

    Positions come with the micro-batch (RoPE is applied in attention), so GPTModel builds none.

    Args: chunk: number of this rank's virtual stage.
    """
    vp_stage = chunk if parallel.num_virtual_stages() > 1 else None
    return {
        "config": settings.transformer,
        "transformer_layer_spec": block_spec(settings.transformer, vp_stage),
        "vocab_size": settings.padded_vocab_size,
        "max_sequence_length": model.max_position_embeddings,
        "pre_process": parallel.is_first_stage(chunk),
        "post_process": parallel.is_last_stage(chunk),
        "position_embedding_type": "none",
        "vp_stage": vp_stage,
    }


def single_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron chained, one for the dense parameters and one for the experts', or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose forward gives log-probs of the wanted tokens, never logits of all of them.

    A stage before the last gives its hidden states. Set `entropy_grad` when the entropy is part of the loss.

    Args: chunk: number of this rank's virtual stage.
    """

    def __init__(
        self, model: ModelSettings, settings: MegatronSettings, *, chunk_size: int | None, chunk: int = 0
    ) -> None:
        super().__init__(
            **gpt_arguments(model, settings, chunk),
            share_embeddings_and_output_weights=model.tie_word_embeddings,
        )
        local_rows = settings.padded_vocab_size // parallel.tp_size()
        fused = torch.device(torch.cuda.current_device()).type == "cuda"
        self.chunk_size = chunk_size or default_chunk_size(local_rows, settings.dtype.itemsize, fused=fused)
        self.entropy_grad = False
        first = parallel.tp_rank() * local_rows
        self._real_rows = min(max(model.vocab_size - first, 0), local_rows)
        self._shard = VocabularyShard(first, parallel.tp_group()) if parallel.tp_size() > 1 else None

    def _postprocess(
        self, hidden_states: Tensor, *, packed_seq_params: Packed, **_: Any
    ) -> tuple[Tensor, Tensor] | Tensor:
        """log_probs [P] and entropy [P], float32, of the micro-batch's wanted tokens."""
        if not self.post_process:
            return hidden_states
        packed = packed_seq_params
        # The head's weights are read without calling it: whatever waits for such a call, as DDP's gather of updated
        # weights does, has to be told.
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())
        # Each tensor-parallel rank gives its part of the gradient by the hidden states; both ways back sum them.
        if self.config.sequence_parallel:
            hidden = take_rows(gather_from_sequence_parallel_region(hidden_states)[:, 0], packed.rows)
        else:
            hidden = copy_to_tensor_model_parallel_region(take_rows(hidden_states[:, 0], packed.rows))
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return chunked_log_probs(
            hidden,
            weight,
            packed.targets,
            temperature=packed.temperature,
            chunk_size=self.chunk_size,
            with_entropy_grad=self.entropy_grad,
            shard=self._shard,
            num_rows=self._real_rows,
            weight_is_shared=tied and self.pre_process,
            support=packed.support,
        )


Chunk = TypeVar("Chunk", bound=GPTModel)


@dataclass(slots=True)
class Policy:
    """A trained model and what trains it: the policy's, and in the same way its critic's."""

    chunks: Sequence[GPTModel]
    """Weights and names, one for each virtual pipeline stage of this rank; forward goes through `ddps`."""
    ddps: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def has_distributed_optimizer(self) -> bool:
        """Whether data-parallel ranks share the optimizer's state among them."""
        return bool(self.ddps[0].ddp_config.use_distributed_optimizer)

    def finish_param_gather(self) -> None:
        """With --overlap-param-gather: wait until this rank has what the others updated. Collective."""
        for ddp in self.ddps:
            if ddp.ddp_config.overlap_param_gather:
                ddp.start_param_sync(force_sync=True)

    def grad_buffers(self) -> list[Tensor]:
        """What gradients are summed up in."""
        return [b.grad_data for ddp in self.ddps for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]

    def optimizer_tensors(self) -> list[Tensor]:
        """The state of the torch optimizers that Megatron's wraps: moments, step counts, and further master weights."""
        wrapped = [o.optimizer for o in single_optimizers(self.optimizer)]
        # One that works on the host keeps the masters of what stays on the device to itself.
        inner = [sub for o in wrapped for sub in getattr(o, "sub_optimizers", [])]
        masters = [p for sub in inner for group in sub.param_groups for p in group["params"]]
        states = [state for o in (*wrapped, *inner) for state in o.state.values()]
        return [*masters, *(value for state in states for value in state.values() if torch.is_tensor(value))]

    def release(self) -> None:
        """Let go of gradients' hooks, at the end: nothing can be trained afterwards."""
        # Autograd's nodes hold the wrapper's hooks and it holds the nodes, a cycle that no collector sees: weights,
        # process groups and their threads would stay.
        for node in (node for ddp in self.ddps for node in ddp.grad_accs):
            node.register_hook(lambda *_: None).hooks_dict_ref().clear()


def build_chunks(
    settings: MegatronSettings, build: Callable[[int], Chunk]
) -> tuple[list[Chunk], list[torch.nn.Module]]:
    """This rank's part of a model, with fresh weights on the current device: one chunk for each of its stages.

    Args: build: makes a chunk, given its number.
    Returns: the chunks, and their wrappers for the dtype they compute in.
    """
    if torch.device(torch.cuda.current_device()).type == "cuda":
        compiler_works()  # asked before Megatron's functions are compiled
    chunks: list[Chunk] = [build(chunk).cuda() for chunk in range(parallel.num_virtual_stages())]
    config = settings.transformer
    wrapped = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    for chunk in chunks:
        keep_router_bias_in_float32(chunk)
    return chunks, wrapped


def build_policy(
    chunks: Sequence[GPTModel],
    wrapped: Sequence[torch.nn.Module],
    settings: MegatronSettings,
    train: TrainConfig,
    *,
    total_steps: int,
) -> Policy:
    """Gradient buffers, optimizer and schedule for a model whose weights are loaded.

    The optimizer copies its float32 master weights from the model here, so weights must be in place before.

    Args: total_steps: optimizer steps of the whole run; the schedule's length unless --lr-decay-iters says otherwise.
    """
    # One bucket for a later chunk: its reduction overlaps with the work of the chunks before it as it is.
    ddps = [
        DistributedDataParallel(settings.transformer, settings.ddp, module, disable_bucketing=number > 0)
        for number, module in enumerate(wrapped)
    ]
    optimizer = get_megatron_optimizer(settings.optimizer, ddps, use_gloo_process_groups=False)
    fused_optimizer.use_fused_adam(single_optimizers(optimizer))
    # The schedules read these from the transformer config.
    settings.transformer.finalize_model_grads_func = None
    settings.transformer.grad_scale_func = optimizer.scale_loss
    settings.transformer.no_sync_func = [ddp.no_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].no_sync
    return Policy(chunks, ddps, optimizer, _scheduler(optimizer, settings, train, total_steps))


def _scheduler(
    optimizer: MegatronOptimizer, settings: MegatronSettings, train: TrainConfig, total_steps: int
) -> OptimizerParamScheduler:
    decay_steps = max(train.lr_decay_iters or total_steps, train.lr_warmup_iters + 1)
    config = settings.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=train.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=train.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=train.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        # WSD's last stretch; megatron-core has no default for it.
        # A resumed run takes its steps from the checkpoint, and everything else from its own settings.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=max(1, decay_steps // 10) if train.lr_decay_style == "WSD" else None,
        lr_wsd_decay_style="linear" if train.lr_decay_style == "WSD" else None,
    )
