"""How fast a training rank worked, and the memory it took. Definitions: vime/observability/metrics.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from vime.models import ModelSettings
from vime.models.flops import forward_flops
from vime.observability.trace import SpanLog
from vime.protocols import DeviceUse
from vime.types import Metrics, TrainBatch

# part of perf/train_time -> forward passes' worth of model operations: a backward pass counts two
_PASSES = {"log_probs": 1, "ref_log_probs": 1, "actor_train": 3}


@contextmanager
def timed(metrics: Metrics, spans: SpanLog, part: str) -> Iterator[None]:
    """Seconds of a part of the training into `metrics`, the device's work included, and a span of it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with spans.span(part):
        yield
        torch.cuda.synchronize()
    metrics[f"perf/{part}_time"] = time.perf_counter() - start


def speed_metrics(
    times: Metrics, batch: TrainBatch, model: ModelSettings, *, num_devices: int, peak_tflops: float | None
) -> Metrics:
    """perf/ metrics that follow from the seconds of the trainer's parts.

    Args:
        times: perf/<part>_time of the parts that ran.
        num_devices: training ranks.
        peak_tflops: what one device could do at most in the dtype of the model; None where nobody knows.
    """
    flops = forward_flops(model, batch.lengths.tolist(), int(batch.loss_mask.sum()))
    metrics: Metrics = {}
    for part, passes in _PASSES.items():
        if seconds := times.get(f"perf/{part}_time"):
            metrics[f"perf/{part}_tflops"] = passes * flops / seconds / num_devices / 1e12
    if seconds := times.get("perf/actor_train_time"):
        metrics["perf/actor_train_tok_per_s"] = len(batch.tokens) / seconds
        if peak_tflops:
            metrics["perf/actor_train_mfu"] = metrics["perf/actor_train_tflops"] / peak_tflops
    return metrics


def memory_metrics(device_type: str) -> Metrics:
    """memory/ metrics of this process; the device's peak is since the last call."""
    metrics: Metrics = {"memory/trainer_rss_bytes": float(psutil.Process().memory_info().rss)}
    if device_type == "cuda":
        metrics["memory/trainer_device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return metrics


def device_memory(device_type: str) -> DeviceUse | None:
    """Of the current device, all processes there counted."""
    if device_type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return DeviceUse(total - free, total)
