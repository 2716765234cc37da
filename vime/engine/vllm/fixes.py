"""Corrections to vLLM itself: each names its release and reason; a test fails once it is no longer needed."""

from __future__ import annotations

import importlib
import os
from typing import Any

from vime.engine.vllm import triton_interpreter
from vime.engine.vllm.versions import adapter_for

_MARK = "_vime_repacks_experts_on_reload"
_NAMES = "_vime_names_the_layer_of_experts"


def apply() -> None:
    """Apply what the installed vLLM needs; twice does no harm."""
    import vllm
    from vllm.platforms import current_platform

    adapter = adapter_for(vllm.__version__)
    if current_platform.is_cpu() and adapter.moe_reload_needs_fix:
        repack_experts_on_reload()
    if triton_interpreter.is_wanted(os.environ):
        choose_tokens_with_torch()
    if adapter.expert_names_need_fix:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        name_the_layer_of_experts(MoERunner)


def choose_tokens_with_torch() -> None:
    """vLLM 0.32.0 under Triton's interpreter: top-k and top-p by torch, as without Triton; they keep the same tokens.

    The kernel calls a method of a number, which is one of Python's own under the interpreter and has none.
    """
    sampler: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    sampler.HAS_TRITON = False


def repack_experts_on_reload() -> None:
    """vLLM 0.32.0 on a CPU: repack a mixture of experts' weights on every load, not only on the first.

    `UnquantizedFusedMoEMethod._setup_kernel` repacks the experts into the CPU kernel's layout when it builds the
    kernel. On a layerwise reload the kernel exists already, the fresh weights keep the checkpoint's layout, and the
    kernel reads them as if they were packed: wrong outputs, without an error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(original, _MARK):
        return

    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(setup_kernel, _MARK, original)
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel  # type: ignore[method-assign]


def name_the_layer_of_experts(runner: Any) -> None:
    """vLLM 0.26.0: what loading experts reports names the layer inside the runner that has them, as parameters do.

    `MoERunner.load_weights` hands on names relative to that layer, which the caller takes for the runner's own: loaded
    experts would look as if no tensor had come for them. 0.32 reports as it is done here.

    Args: runner: the class.
    """
    original = runner.load_weights
    if hasattr(original, _NAMES):
        return

    def load_weights(self: Any, weights: Any) -> Any:
        for name in original(self, weights):
            yield f"routed_experts.{name}"

    setattr(load_weights, _NAMES, original)
    runner.load_weights = load_weights
