"""vLLM's scheduler with fixed batches: which requests are computed together does not depend on when they arrive.

The sums of a matrix product depend, in their last bits, on how many rows it has, so a sample depends on what is
generated beside it. A request that names a batch is held until the whole batch is there; then all of it is scheduled,
in the order of its places. Written for vLLM 0.26 to 0.32, whose `Scheduler.add_request` is where requests come in.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vime.engine.vllm.answers import BATCH_KEY


class FixedBatchScheduler(Scheduler):
    """Given to engines as --scheduler-cls where a run is --deterministic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, dict[tuple[int, str], Any]] = {}

    def add_request(self, request: Any) -> None:
        """Schedule a request, or hold it until the others of its batch have come."""
        sampling = request.sampling_params
        place = (sampling.extra_args or {}).get(BATCH_KEY) if sampling is not None else None
        if place is None:
            super().add_request(request)
            return
        name, size, index = place
        held = self._held.setdefault(name, {})
        held[int(index), request.request_id] = request  # the samples of one request begin with their number
        if len(held) == int(size):
            del self._held[name]
            for key in sorted(held):
                super().add_request(held[key])

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """As vLLM's, and of those that are held, too."""
        ids = None if request_ids is None else {request_ids} if isinstance(request_ids, str) else set(request_ids)
        for name, held in list(self._held.items()):
            left = {key: r for key, r in held.items() if ids is not None and r.request_id not in ids}
            if left:
                self._held[name] = left
            else:
                del self._held[name]
        return super().finish_requests(ids, finished_status)
