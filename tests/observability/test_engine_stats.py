import pytest

from vime.observability.activity import Activity
from vime.observability.derived import derived_metrics
from vime.observability.engine_stats import EngineStats, engine_metrics
from vime.observability.metrics import check_names


def test_two_readings_describe_the_time_between_them():
    before = [EngineStats(num_requests=10, queue_s=5), EngineStats()]
    after = [
        EngineStats(num_requests=14, queue_s=7, running_s=8, looked_up_tokens=100, cached_tokens=25, rss_bytes=3),
        EngineStats(num_requests=4, queue_s=2, running_s=4, num_first_tokens=5, first_token_s=1, rss_bytes=2),
    ]
    metrics = engine_metrics(before, after, seconds=3.0)
    check_names(metrics)
    assert metrics["perf/request_latency/queue"] == (2 + 2) / (4 + 4)
    assert metrics["perf/request_latency/first_token"] == 0.2
    assert metrics["perf/engine_running_requests"] == (8 + 4) / (3 * 2)
    assert metrics["rollout/prefix_cache_hit_rate"] == 0.25
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 25 / 8
    assert metrics["memory/engine_rss_bytes"] == 3


def test_an_engine_that_was_restarted_counts_from_zero():
    assert EngineStats(num_requests=2, queue_s=1).since(EngineStats(num_requests=9, queue_s=50)).queue_s == 1
    more_since = EngineStats(num_requests=12, queue_s=1).since(EngineStats(num_requests=9, queue_s=50))
    assert (more_since.num_requests, more_since.queue_s) == (12, 1)
    smaller = EngineStats(num_requests=12, rss_bytes=1).since(EngineStats(num_requests=9, rss_bytes=2))
    assert (smaller.num_requests, smaller.rss_bytes) == (3, 1), "memory is no total"


def test_no_requests_give_no_latencies():
    metrics = engine_metrics([EngineStats()], [EngineStats()], seconds=1.0)
    assert metrics == {"rollout/num_preemptions": 0.0, "perf/engine_running_requests": 0.0}


def test_activity_counts_overlapping_work_once():
    now = [0.0]
    activity = Activity(lambda: now[0])
    first, second = activity.running(), activity.running()
    first.__enter__()
    now[0] = 2.0
    second.__enter__()
    now[0] = 3.0
    assert activity.busy_s == 3.0, "work that still runs is counted"
    first.__exit__(None, None, None)
    now[0] = 5.0
    second.__exit__(None, None, None)
    now[0] = 9.0
    assert activity.busy_s == 5.0


def test_shares_are_of_the_step_without_what_only_some_steps_do():
    step = {"perf/step_time": 20.0, "perf/eval_time": 6.0, "perf/save_model_time": 4.0, "perf/train_time": 4.0}
    metrics = derived_metrics(
        step | {"perf/actor_train_time": 2.0, "perf/log_probs_time": 1.0, "perf/engine_busy_s": 5.0}
    )
    check_names(metrics)
    assert metrics == {
        "perf/step_time_without_eval_and_save": 10.0,
        "perf/wait_time_ratio": pytest.approx(0.6),
        "perf/trainer_compute_ratio": 0.3,
        "perf/engine_busy_ratio": 0.5,
    }
    assert derived_metrics({"eval/x": 1.0}) == {}
