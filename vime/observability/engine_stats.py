"""What an engine has done since it started, and what two readings say of the time between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vime.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals that only grow, so that the difference of two readings describes the time between them."""

    num_requests: float = 0.0
    """Requests that ended; one that asks for n samples counts n times."""
    queue_s: float = 0.0
    """Seconds they waited in the engine's queue, summed, as all seconds here."""
    prefill_s: float = 0.0
    """From their scheduling to their first token."""
    decode_s: float = 0.0
    """From their first to their last token."""
    running_s: float = 0.0
    """From their scheduling to their last token."""
    total_s: float = 0.0
    """From their arrival to their last token."""
    num_first_tokens: float = 0.0
    """Requests that got a first token."""
    first_token_s: float = 0.0
    """From arrival to the first token, over those."""
    looked_up_tokens: float = 0.0
    """Prompt tokens looked for in the prefix cache."""
    cached_tokens: float = 0.0
    """Those of them that were found."""
    sampled_tokens: float = 0.0
    num_preemptions: float = 0.0
    rss_bytes: float = 0.0
    """Memory of the server's process now (not a total); 0 where the engine does not say."""

    def since(self, earlier: EngineStats) -> EngineStats:
        """What happened after `earlier`, a reading of the same engine; an engine restarted since counts from 0."""
        totals = [f.name for f in fields(self) if f.name != "rss_bytes"]
        restarted = any(getattr(self, name) < getattr(earlier, name) for name in totals)
        base = EngineStats() if restarted else earlier
        difference = {f.name: getattr(self, f.name) - getattr(base, f.name) for f in fields(self)}
        return EngineStats(**{**difference, "rss_bytes": self.rss_bytes})


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """The sum over engines."""
    return EngineStats(**{f.name: sum(getattr(s, f.name) for s in stats) for f in fields(EngineStats)})


def engine_metrics(before: Sequence[EngineStats], after: Sequence[EngineStats], seconds: float) -> Metrics:
    """perf/, rollout/ and memory/ metrics of what the engines did between two readings.

    Args: before, after: one reading per engine, in the same order. seconds: between them.
    """
    each = [late.since(early) for early, late in zip(before, after, strict=True)]
    sum_ = total(each)
    metrics: Metrics = {
        "rollout/num_preemptions": sum_.num_preemptions,
        "perf/engine_running_requests": sum_.running_s / (seconds * max(len(each), 1)),
    }
    if sum_.num_requests:
        for name in ("queue", "prefill", "decode", "total"):
            metrics[f"perf/request_latency/{name}"] = getattr(sum_, f"{name}_s") / sum_.num_requests
        metrics["rollout/avg_cached_tokens_per_sample"] = sum_.cached_tokens / sum_.num_requests
    if sum_.num_first_tokens:
        metrics["perf/request_latency/first_token"] = sum_.first_token_s / sum_.num_first_tokens
    if sum_.looked_up_tokens:
        metrics["rollout/prefix_cache_hit_rate"] = sum_.cached_tokens / sum_.looked_up_tokens
    if largest := max((s.rss_bytes for s in after), default=0.0):
        metrics["memory/engine_rss_bytes"] = largest
    return metrics
