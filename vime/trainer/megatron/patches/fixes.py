"""What megatron-core 0.16.1 needs on every platform where transformer-engine and apex are not installed.

Each fix names the fault; tests/trainer/megatron/patches/test_fixes.py fails when a fault is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, ChainedOptimizer, optimizer_config
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import get_te_version

from vime.trainer.megatron.checkpoints import gathered_state
from vime.trainer.megatron.optimizers import fused_optimizer, host_optimizer

_MARK = "__vime_fixed__"


def apply() -> None:
    """Apply all fixes; a second call does nothing."""
    bind_missing_te_names()
    fix_version_of_missing_te()
    fix_torch_adamw_checkpoints()
    fix_checkpoints_of_several_buckets()
    fix_checkpoints_of_stages_without_experts()
    fix_recomputed_norms()
    gathered_state.install()
    fused_optimizer.install()
    host_optimizer.install()


def bind_missing_te_names() -> None:
    """Names that moe_utils binds only where transformer-engine imports, but looks up everywhere (a NameError)."""
    for name in ("te_general_gemm", "fused_topk_with_score_function"):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def fix_version_of_missing_te() -> None:
    """OptimizerConfig compares the version of transformer-engine where the optimizer is on the host, even with none."""
    if get_te_version() is None:
        optimizer_config.is_te_min_version = lambda version, check_equality=True: False


def fix_recomputed_norms() -> None:
    """Norms that --recompute-modules layernorm repeats: "no fp8" is taken for some fp8, which asks transformer-engine
    (a NameError)."""
    original = CheckpointWithoutOutput.__init__
    if hasattr(original, _MARK):
        return

    def init(self: Any, fp8: Any = None) -> None:
        original(self, fp8=fp8 or None)

    setattr(init, _MARK, True)
    CheckpointWithoutOutput.__init__ = init


def fix_torch_adamw_checkpoints() -> None:
    """Checkpoints of the distributed optimizer over torch's AdamW, which is what it uses without apex or TE.

    Faults: (1) a fresh optimizer has no 'step', and state_dict asserts it; (2) load_state_dict gives all parameters
    one shared step tensor, so that a step advances it once per parameter: silently wrong Adam; (3) fully_reshardable
    loading looks for a 'step' it never saved; (4) loading writes into leaf parameters outside no_grad; (5) without any
    parameter, as the experts' optimizer on a pipeline stage of dense layers, there is no 'step' to be found either.
    """
    cls = DistributedOptimizer
    if not USING_PYTORCH_OPTIMIZER or hasattr(cls.state_dict, _MARK):
        return
    original_state, original_load = cls.state_dict, cls.load_state_dict
    original_set = cls._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        if not any(group["params"] for group in self.optimizer.param_groups):
            groups = [{**group, "step": 0.0} for group in self.optimizer.state_dict()["param_groups"]]
            return {"optimizer": {"param_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups]}}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if "step" not in self.optimizer.state[p]:
                    self.optimizer.state[p].update(
                        step=fused_optimizer.zero_step(group, p),
                        exp_avg=torch.zeros_like(p),
                        exp_avg_sq=torch.zeros_like(p),
                    )
        return original_state(self)

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"].clone()}
        return original_set(self, model_param, tensors)

    @torch.no_grad()
    def load_state_dict(self: Any, state: Any) -> None:
        fused = [group.get("fused") for group in self.optimizer.param_groups]
        is_torch_adam = isinstance(self.optimizer, torch.optim.Adam)
        original_load(self, state)
        for group, is_fused in zip(self.optimizer.param_groups, fused, strict=True):
            group["fused"] = is_fused  # the run that saved may have been on another device
            for p in group["params"]:
                entry = self.optimizer.state.get(p, {})
                if torch.is_tensor(step := entry.get("step")):
                    own = fused_optimizer.zero_step(group, p) if is_torch_adam else torch.zeros_like(step)
                    entry["step"] = own.copy_(step)

    setattr(state_dict, _MARK, True)
    cls.state_dict, cls.load_state_dict = state_dict, load_state_dict
    cls._set_main_param_and_optimizer_states = set_states


def fix_checkpoints_of_several_buckets() -> None:
    """Checkpoints of the distributed optimizer where gradients lie in more than one bucket: silently wrong weights.

    Fault: sharded_param_state_fully_reshardable concatenates the buckets without the padding at their ends, but cuts
    parameters out of that at their places with padding, so that all but the first bucket's are shifted. A tied
    embedding on a pipeline's last stage always has a bucket of its own; --overlap-grad-reduce makes many.
    """
    cls = DistributedOptimizer
    if hasattr(cls.sharded_param_state_fully_reshardable, _MARK):
        return
    original = cls.sharded_param_state_fully_reshardable

    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _places_without_padding(buffer)
            return original(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places

    setattr(sharded_param_state_fully_reshardable, _MARK, True)
    cls.sharded_param_state_fully_reshardable = sharded_param_state_fully_reshardable


def _places_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """A gradient buffer's parameter -> (start, end, bucket), if buckets lay end to end without padding."""
    shifts, end = [], 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - end)
        end += bucket.numel_unpadded
    return {
        parameter: (start - shifts[bucket], stop - shifts[bucket], bucket)
        for parameter, (start, stop, bucket) in buffer.param_index_map.items()
    }


def fix_checkpoints_of_stages_without_experts() -> None:
    """Checkpoints where the experts' optimizer has parameters on some pipeline stages only: leading layers are dense.

    Fault: what is saved of it is the first stage's word, which does not know how many steps the others took.
    """
    cls = ChainedOptimizer
    if not USING_PYTORCH_OPTIMIZER or hasattr(cls.sharded_state_dict, _MARK):
        return
    original = cls.sharded_state_dict

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        if len(self.chained_optimizers) > 1 and all(
            isinstance(o, DistributedOptimizer) for o in self.chained_optimizers
        ):
            groups = [group for part in state.values() for group in part["optimizer"]["param_groups"]]
            step = max(group["step"] for group in groups)  # the same everywhere, but 0 where there is no parameter
            for group in groups:
                group["step"] = step
        return state

    setattr(sharded_state_dict, _MARK, True)
    cls.sharded_state_dict = sharded_state_dict
