"""Weight syncs of mixtures of experts on the real engine: three right ones, wrong ones, and what a drafter keeps."""

from __future__ import annotations

from typing import Any

import pytest

from vime.weight_sync.verify import DEFAULT_TOLERANCE

pytestmark = pytest.mark.engine

EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_log_probs_after_each_sync_are_those_of_the_new_weights(moe_syncs: dict[str, Any], name: str) -> None:
    """The GLM checkpoint has a multi-token-prediction layer; no sync brings it, and this engine has no drafter."""
    result = moe_syncs[name]
    assert result["start"] < 1e-5 and result["stale"] > 0.1
    assert len(result["synced"]) == 3 and max(result["synced"]) < 1e-5


def test_the_probe_of_a_bf16_mixture_tells_a_right_sync_from_none(moe_syncs: dict[str, Any]) -> None:
    """Rounding sends some tokens to other experts, so that single ones differ much; the mean is what is bounded."""
    result, bound = moe_syncs["qwen3_moe_bf16"], DEFAULT_TOLERANCE["bfloat16"].bound
    assert max(result["start"], *result["synced"]) < bound < result["stale"]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_bf16", "glm4_moe"])
def test_three_syncs_give_what_an_engine_started_from_the_checkpoint_gives(
    moe_syncs: dict[str, Any], name: str
) -> None:
    assert moe_syncs[name]["fresh"] == 0.0, "the same weights in the same kernels"
    assert moe_syncs[name]["stale"] > 0.1


def test_an_expert_that_is_left_out_or_passed_over_is_named_and_a_swapped_one_shows(moe_syncs: dict[str, Any]) -> None:
    result = moe_syncs["qwen3_moe"]
    assert f"missing: {EXPERT}.5.down_proj.weight" in result["left_out"]
    # vLLM's loader ignored it: its parameter, the same for all experts of the layer, counts as loaded.
    assert f"filled only in part: {EXPERT}.routed_experts (94208 of 98304 elements)" in result["passed_over"]
    refusal, distance = result["swapped"]
    assert refusal == "" and distance > 1e-2, "names and checksums cannot see it; the probe does"
    assert result["right_again"] < 1e-5


def test_a_drafter_keeps_its_own_layer_and_shares_embedding_and_head_with_the_policy(moe_syncs: dict[str, Any]) -> None:
    result = moe_syncs["drafter"]
    assert max(result["synced"]) < 1e-5
    assert result["changed"] == ["model.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    assert result["kept"] > 8
