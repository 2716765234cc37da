import math
import random
import string
from dataclasses import replace

import pytest

from vime.observability.activity import Activity
from vime.observability.engine_stats import EngineStats
from vime.observability.metrics import check_names
from vime.rollout.meter import RolloutMeter
from vime.rollout.sample_metrics import is_repetitive, num_turns, sample_metrics
from vime.types import Group, Sample


def sample(number, mask, reward, *, response="", trace=()):
    return Sample(
        tokens=(1, *range(len(mask))),
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=[-1.0 if m else math.nan for m in mask],
        reward=reward,
        response=response,
        group_id=number // 2,
        sample_id=number,
        trajectory_id=number,
        trace=list(trace),
    )


def metrics_of(*samples, **arguments):
    groups = [Group(g, [s for s in samples if s.group_id == g]) for g in sorted({s.group_id for s in samples})]
    settings = {"begin_s": 0.0, "seconds": 2.0, "num_devices": 2, "reward_key": None} | arguments
    metrics = sample_metrics(groups, **settings)
    check_names(metrics)
    return metrics


def test_turns_are_runs_of_the_policys_own_tokens():
    assert [num_turns(bytes(m)) for m in ([1, 1, 0, 1], [0, 1, 1], [0], [1, 0, 1, 0, 1], [])] == [2, 1, 0, 3, 0]
    metrics = metrics_of(sample(0, [1, 1, 0, 0, 1], 1.0), sample(1, [1], 0.0))
    assert metrics["multi_turn/round_number/mean"] == 1.5
    assert metrics["multi_turn/raw_response_length/max"] == 5
    assert metrics["multi_turn/wo_obs_response_length/max"] == 3
    assert "multi_turn/round_number/mean" not in metrics_of(sample(0, [1], 1.0))


def test_speeds_are_per_second_of_the_rollout_and_device():
    trace = [{"name": "generate", "start_s": 0, "end_s": 2}, {"name": "tool", "start_s": 0.5, "end_s": 1.5}]
    metrics = metrics_of(sample(0, [1] * 8 + [0] * 2, 1.0, trace=trace), sample(1, [1, 1], 0.0))
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 10 / (2 * 2)
    assert metrics["perf/sample_seconds/generate/mean"] == 2.0 and "perf/sample_seconds/reward/mean" not in metrics
    assert metrics["perf/longest_sample_tokens_per_sec"] == 10 / 2
    assert metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] == 10 / (2 - 1)
    assert (metrics["perf/non_generation_time/max"], metrics["perf/non_generation_time/mean"]) == (1.0, 0.5)
    later = metrics_of(sample(0, [1] * 10, 1.0, trace=trace), sample(1, [1], 0.0), begin_s=1.0)
    assert later["perf/longest_sample_tokens_per_sec_without_non_generation"] == 10 / (2 - 0.5), "of this rollout alone"


def test_pass_rates_and_lengths_of_right_answers():
    metrics = metrics_of(sample(0, [1], 1.0), sample(1, [1, 1], 0.0), sample(2, [1], 0.0), sample(3, [1], 0.0))
    assert (metrics["passrate/pass@1"], metrics["passrate/pass@2"]) == (0.25, 0.5)
    assert metrics["rollout/correct_length/mean"] == 1
    siblings = [replace(sample(n, [1], float(n < 2)), group_id=0, trajectory_id=n // 2) for n in range(4)]
    assert metrics_of(*siblings)["passrate/pass@1"] == 0.5
    assert "passrate/pass@4" not in metrics_of(*siblings), "siblings count once"
    assert "passrate/pass@1" not in metrics_of(sample(0, [1], 0.5), sample(1, [1], 1.0)), "no rate of partial rewards"
    assert "passrate/pass@1" not in metrics_of(sample(0, [1], None), sample(1, [1], None)), "supervised: no rewards"


def test_repetition_is_what_zlib_shrinks_tenfold_at_the_end():
    rng = random.Random(0)
    noise = "".join(rng.choices(string.ascii_letters, k=12_000))
    assert is_repetitive("so on " * 300) and is_repetitive(noise + "so on " * 2_000)
    assert not any(map(is_repetitive, ("", "ab" * 50, noise, "so on " * 2_000 + noise)))


def test_the_meter_counts_what_engines_sampled_between_start_and_finish():
    now, requests = [10.0], [0]
    readings = iter([[EngineStats(sampled_tokens=100)], [EngineStats(sampled_tokens=160, num_requests=2, queue_s=1)]])
    activity = Activity(lambda: now[0])
    meter = RolloutMeter(
        read_stats=lambda: next(readings),
        num_requests=lambda: requests[0],
        activity=activity,
        num_devices=2,
        reward_key=None,
        clock=lambda: now[0],
    )
    groups = [Group(0, [sample(0, [1], 1.0)])]
    begin = meter.start()
    with activity.running():
        now[0] = 13.0
        requests[0] += 2
    metrics = meter.finish(begin, groups)
    check_names(metrics)
    assert metrics["perf/tokens_per_gpu_per_sec"] == 60 / (3 * 2)
    assert (metrics["perf/engine_busy_s"], metrics["perf/request_latency/queue"]) == (3.0, 0.5)
    ((span,),) = meter.take_spans()
    assert (span["sampled_tokens"], span["end_s"] - span["start_s"]) == (60, pytest.approx(3.0))
    assert meter.take_spans() == []

    readings = iter([None, [EngineStats(sampled_tokens=170)], [EngineStats(sampled_tokens=200)]])
    begin = meter.start()
    assert begin.stats == [EngineStats(sampled_tokens=160, num_requests=2, queue_s=1)], "nobody used the engines since"
    now[0], requests[0] = 14.0, 3
    assert "perf/tokens_per_gpu_per_sec" not in meter.finish(begin, groups), "an engine did not answer"
    begin = meter.start()
    requests[0] = 4  # an evaluation would come before the next rollout
    now[0] = 15.0
    assert meter.finish(begin, groups)["perf/tokens_per_gpu_per_sec"] == 30 / (1 * 2)
    requests[0] = 5
    readings = iter([[EngineStats(sampled_tokens=210)]])
    assert meter.start().stats == [EngineStats(sampled_tokens=210)], "somebody used the engines since"
