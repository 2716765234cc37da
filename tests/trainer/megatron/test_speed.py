from types import SimpleNamespace

import numpy as np
import pytest

from vime.models import ModelSettings
from vime.models.flops import forward_flops
from vime.observability.metrics import check_names
from vime.trainer.megatron.speed import memory_metrics, speed_metrics

MODEL = ModelSettings(
    transformer={
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "kv_channels": 4,
        "gated_linear_unit": True,
        "add_qkv_bias": False,
        "qk_layernorm": True,
    },
    vocab_size=11,
    max_position_embeddings=64,
    rotary_base=1e4,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
BATCH = SimpleNamespace(lengths=np.array([5, 3]), loss_mask=np.array([0, 0, 1, 1, 1, 0, 1, 1]), tokens=np.zeros(8))


def test_training_counts_three_forward_passes_and_a_log_prob_pass_one():
    times = {"perf/log_probs_time": 2.0, "perf/actor_train_time": 4.0}
    metrics = speed_metrics(times, BATCH, MODEL, num_devices=2, peak_tflops=1e-9)
    check_names(metrics)
    forward = forward_flops(MODEL, [5, 3], num_logits=5) / 1e12
    assert metrics["perf/log_probs_tflops"] == pytest.approx(forward / 2 / 2)
    assert metrics["perf/actor_train_tflops"] == pytest.approx(3 * forward / 4 / 2)
    assert metrics["perf/actor_train_mfu"] == pytest.approx(3 * forward / 4 / 2 / 1e-9)
    assert metrics["perf/actor_train_tok_per_s"] == 2.0
    assert "perf/ref_log_probs_tflops" not in metrics


def test_no_utilisation_is_claimed_where_the_peak_is_not_known():
    assert "perf/actor_train_mfu" not in speed_metrics(
        {"perf/actor_train_time": 1.0}, BATCH, MODEL, num_devices=1, peak_tflops=None
    )


def test_a_rank_reports_its_memory():
    metrics = memory_metrics("cpu")
    check_names(metrics)
    assert metrics["memory/trainer_rss_bytes"] > 10_000_000 and len(metrics) == 1
