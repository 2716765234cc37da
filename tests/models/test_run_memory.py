"""What a run's settings say to the decision who leaves a shared device."""

from __future__ import annotations

from typing import Any

from tests.models.shapes import QWEN3_06B, QWEN3_30B
from vime.config import ClusterConfig, Config, RolloutConfig, TrainConfig
from vime.models import ModelSettings
from vime.models.memory import GIB
from vime.models.run_memory import need_of, wishes_of
from vime.models.sharing import Need, Wishes, decide

TOKEN = 2 * 28 * 8 * 128 * 2  # bytes of Qwen3-0.6B's keys and values


def need(model: ModelSettings = QWEN3_06B, *, vllm: dict[str, Any] | None = None, **rollout: Any) -> Need:
    sizes = {"rollout_batch_size": 64, "n_samples_per_prompt": 8, "rollout_max_context_len": 1280, **rollout}
    config = Config(
        cluster=ClusterConfig(colocate=True),
        rollout=RolloutConfig(**sizes),
        train=TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=20_480),
        vllm=vllm or {},
    )
    return need_of(config, model, "bfloat16", world_size=1, device_bytes=140 * GIB)


def test_the_cache_that_is_wanted_holds_every_request_in_flight_at_its_full_length() -> None:
    assert need().cache == 512 * 1280 * TOKEN
    assert need(rollout_concurrency=100).cache == 100 * 1280 * TOKEN
    assert need(n_samples_per_prompt=1).cache == 64 * 1280 * TOKEN
    assert need(vllm={"max_num_seqs": 16}).cache == 16 * 1280 * TOKEN
    assert need(vllm={"kv_cache_memory_bytes": GIB}).cache == GIB


def test_qwen3_06b_trains_beside_its_engine_on_an_h200_and_in_its_place_with_more_requests() -> None:
    """Measured without buckets and context: 38 GiB in a step of 20,480 tokens (benchmarks/README.md)."""
    sizes = need()
    assert 36 < sizes.step / GIB < 42 and 9 < sizes.static / GIB < 14 and sizes.late == 8 * 596_049_920
    assert not decide(sizes).moves
    more = decide(need(n_samples_per_prompt=11, rollout_concurrency=1024))
    assert more.engines_sleep and not more.trainer_leaves


def test_a_model_that_fills_the_device_leaves_it_to_the_engines() -> None:
    sizes = need(QWEN3_30B)
    assert sizes.static > 140 * GIB and sizes.engine < 64 * GIB
    assert decide(sizes).trainer_leaves


def test_offload_says_it_for_both_where_nothing_else_does() -> None:
    def wishes(**cluster: bool) -> Wishes:
        return wishes_of(Config(cluster=ClusterConfig(colocate=True, **cluster)))

    assert wishes() == Wishes()
    assert wishes(offload=True) == Wishes(offload_train=True, offload_rollout=True)
    assert wishes(offload=True, offload_train=False) == Wishes(offload_train=False, offload_rollout=True)
