"""Each correction to vLLM does what it is for, and is still needed."""

from __future__ import annotations

from typing import Any

import pytest

from vime.engine.vllm import fixes
from vime.engine.vllm.versions import adapter_for

pytestmark = pytest.mark.engine


@pytest.mark.skipif(not adapter_for().moe_reload_needs_fix, reason="this vLLM reloads experts correctly")
def test_experts_are_repacked_on_reload_and_would_not_be_without_the_fix(moe_syncs: dict[str, Any]) -> None:
    result = moe_syncs["qwen3_moe"]
    assert max(result["synced"]) < 1e-5
    # Fails once vLLM repacks by itself: then remove repack_experts_on_reload and moe_reload_needs_fix for that release.
    assert result["without_fix"] > 0.1, f"the fix is not needed any more: {result}"


class _Experts:
    """Reports the names of its parameters, as vLLM's RoutedExperts does."""

    def load_weights(self, weights: Any) -> Any:
        yield from ("w13_weight", "w2_weight")


class _Runner:
    """As vLLM 0.26's MoERunner."""

    def __init__(self) -> None:
        self.routed_experts = _Experts()

    def load_weights(self, weights: Any) -> Any:
        return self.routed_experts.load_weights(weights)


def test_loaded_experts_are_reported_under_the_names_of_their_parameters() -> None:
    for _ in range(2):  # twice does no harm
        fixes.name_the_layer_of_experts(_Runner)
    assert list(_Runner().load_weights([])) == ["routed_experts.w13_weight", "routed_experts.w2_weight"]


@pytest.mark.skipif(not adapter_for().expert_names_need_fix, reason="this vLLM reports loaded experts rightly")
def test_vllm_itself_would_report_names_that_no_parameter_has() -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    fixes.apply()
    original = getattr(MoERunner.load_weights, fixes._NAMES)
    # Fails once vLLM names them by itself: then remove name_the_layer_of_experts and expert_names_need_fix for it.
    assert list(original(_Runner(), [])) == ["w13_weight", "w2_weight"]
    assert list(MoERunner.load_weights(_Runner(), [])) == ["routed_experts.w13_weight", "routed_experts.w2_weight"]
