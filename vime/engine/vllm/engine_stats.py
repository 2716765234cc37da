"""vLLM's own counters (GET /metrics, Prometheus text) as `EngineStats`. The same names in 0.26 and 0.32."""

from __future__ import annotations

from collections import defaultdict

from vime.observability.engine_stats import EngineStats

# EngineStats field -> name of the sample in the text; its label sets (data-parallel engines) are summed.
_NAMES = {
    "num_requests": "vllm:e2e_request_latency_seconds_count",
    "total_s": "vllm:e2e_request_latency_seconds_sum",
    "queue_s": "vllm:request_queue_time_seconds_sum",
    "prefill_s": "vllm:request_prefill_time_seconds_sum",
    "decode_s": "vllm:request_decode_time_seconds_sum",
    "running_s": "vllm:request_inference_time_seconds_sum",
    "num_first_tokens": "vllm:time_to_first_token_seconds_count",
    "first_token_s": "vllm:time_to_first_token_seconds_sum",
    "looked_up_tokens": "vllm:prefix_cache_queries_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "sampled_tokens": "vllm:generation_tokens_total",
    "num_preemptions": "vllm:num_preemptions_total",
    "rss_bytes": "process_resident_memory_bytes",
}


def parse_engine_stats(text: str) -> EngineStats:
    """The totals in an answer to GET /metrics; one that it lacks is 0."""
    found: dict[str, float] = defaultdict(float)
    wanted = set(_NAMES.values())
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, rest = line.partition("{")
        if rest:
            value = rest.rpartition("}")[2]
        else:
            name, _, value = line.partition(" ")
        if name in wanted:
            found[name] += float(value.split()[0])
    return EngineStats(**{field: found[name] for field, name in _NAMES.items()})
