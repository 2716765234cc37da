"""What megatron-core 0.16.1 needs on every platform where transformer-engine and apex are not installed.

Each fix names the fault; tests/trainer/megatron/test_fixes.py fails when a fault is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils

_MARK = "__vime_fixed__"


def apply() -> None:
    """Apply all fixes; a second call does nothing."""
    bind_missing_te_names()
    fix_torch_adamw_checkpoints()


def bind_missing_te_names() -> None:
    """Names that moe_utils binds only where transformer-engine imports, but looks up everywhere (a NameError)."""
    for name in ("te_general_gemm", "fused_topk_with_score_function"):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def fix_torch_adamw_checkpoints() -> None:
    """Checkpoints of the distributed optimizer over torch's AdamW, which is what it uses without apex or TE.

    Faults: (1) a fresh optimizer has no 'step', and state_dict asserts it; (2) load_state_dict gives all parameters
    one shared step tensor, so that a step advances it once per parameter: silently wrong Adam; (3) fully_reshardable
    loading looks for a 'step' it never saved; (4) loading writes into leaf parameters outside no_grad.
    """
    cls = DistributedOptimizer
    if not USING_PYTORCH_OPTIMIZER or hasattr(cls.state_dict, _MARK):
        return
    original_state, original_load = cls.state_dict, cls.load_state_dict
    original_set = cls._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if "step" not in self.optimizer.state[p]:
                    self.optimizer.state[p].update(
                        step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
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
        original_load(self, state)
        for entry in self.optimizer.state.values():
            if torch.is_tensor(entry.get("step")):
                entry["step"] = entry["step"].clone()

    setattr(state_dict, _MARK, True)
    cls.state_dict, cls.load_state_dict = state_dict, load_state_dict
    cls._set_main_param_and_optimizer_states = set_states
