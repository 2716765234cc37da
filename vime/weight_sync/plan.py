"""One weight sync: trainer to engines, verified, in order.

    pause (requests are frozen)
      -> begin: version, transport, the names that will come        engine checks them against its checkpoint
      -> bucket by bucket, each to every engine                     engine checks every tensor's checksum
         the next one is gathered while engines load this one
      -> commit                                                     names complete, prefix cache reset, version stamped
      -> resume
      -> probe, when due                                            trainer re-scores what the engines say
    only then does the version count

Where both sides share devices, they change places before the pause, between commit and resume, and around the scoring
(vime/loop/turns.py).

Where engines are restarted, one that fails on the way is left out; when its server is back, `join` brings it the
weights that the trainer has then. A broadcast needs every engine: a sync that one of them failed is done again by all.

The probe comes after resume because a paused vLLM generates nothing. If it fails, the engines are paused again and
refuse to serve, and the run ends: nothing sampled in between is trained on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from vime.errors import EngineDead, WeightSyncError
from vime.observability.trace import Span, SpanLog
from vime.protocols import Engine, Roster, Trainer, Turns
from vime.types import Metrics, PolicyVersion
from vime.weight_sync.verify import PROBE_TOKENS, ProbeReport, ProbeTolerance, compare_probe, probe_sequences

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_BROADCASTS = ("gloo", "nccl")
"""Transports that every engine takes part in."""


class _DoAgain(WeightSyncError):
    """An engine that takes part in a broadcast is being restarted."""


class WeightSync:
    """Publishes the trainer's weights to the engines; `publish()` is called once before the first rollout and after
    each step. `version` is that of the last publish that ended well; `metrics` describes it.

    Args:
        trainer: the source.
        engines: the targets, each by its own handle, never through a router.
        transport: name of the transport whose writer the trainer uses.
        probe_prompts: tokenized prompts; needed unless `probe_interval` is 0.
        probe_interval: probe at the first publish and every this many after it; 0: never.
        probe_tolerance: how large a log-prob difference a probe may show.
        on_version: called with each version that counts (clients of engines that do not report it need it).
        turns: where trainer and engines share devices.
        lock: held while the trainer is used; re-entrant, and shared with whoever else uses it beside this thread.

    `roster` may be set to who restarts engines.

    Raises: ValueError if probes are wanted but there are no prompts, or there is no engine.
    """

    def __init__(
        self,
        trainer: Trainer,
        engines: Sequence[Engine],
        *,
        transport: str,
        probe_prompts: Sequence[Sequence[int]],
        probe_interval: int,
        probe_tolerance: ProbeTolerance,
        on_version: Callable[[PolicyVersion], None] | None = None,
        turns: Turns | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        if not engines:
            raise ValueError("a weight sync needs at least one engine")
        if probe_interval and not probe_prompts:
            raise ValueError(f"--weight-probe-interval is {probe_interval}, but there are no prompts to probe with")
        self._trainer, self._engines, self._transport = trainer, tuple(engines), transport
        self._prompts, self._interval, self._tolerance = probe_prompts, probe_interval, probe_tolerance
        self._pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="weight-sync")
        self._published = 0
        self._on_version, self._turns = on_version, turns
        self.roster: Roster | None = None
        self._lock = lock or threading.RLock()
        self._targets = list(range(len(self._engines)))  # of the sync under way
        self._spans = [SpanLog() for _ in self._engines]
        self.version: PolicyVersion = 0
        self.metrics: Metrics = {}

    @property
    def waits_for_all(self) -> bool:
        """Whether a sync waits until every engine is there, one that is being restarted, too."""
        return self._transport in _BROADCASTS

    def publish(self, version: PolicyVersion | None = None) -> PolicyVersion:
        """Send the trainer's weights to every engine, verify them, and only then count them as this version.

        Args: version: above the last one; default: one more.
        Returns: the new version.
        Raises: WeightSyncError naming engine and tensors; the engines then stay paused and refuse to serve.
        """
        version = self.version + 1 if version is None else version
        with self._lock:
            self.metrics = self._sync_all(version, probe=self._is_probe_due())
            self.version = version
            if self._on_version is not None:
                self._on_version(version)
            self._published += 1
        return version

    def join(self, number: int, version: PolicyVersion) -> None:
        """Bring the trainer's weights to an engine that was restarted, and verify them, by a probe, too.

        On shared devices and by a broadcast that is a sync of all engines. Other than by `publish`, the version counts
        for this engine alone.

        Args: version: of the trainer's weights now.
        Raises: WeightSyncError, EngineError if the engine is not fit to serve.
        """
        with self._lock:
            if self._turns is not None or self._transport in _BROADCASTS:
                self._sync_all(version, probe=bool(self._interval), joining=number)
            else:
                self._sync([number], version, probe=bool(self._interval))
            if number not in self._targets:
                raise EngineDead(f"engine {number} failed again while it got its weights")

    def _sync_all(self, version: PolicyVersion, *, probe: bool, joining: int | None = None) -> Metrics:
        """All engines that are there; those that are not wait for `join`. Returns: metrics.

        Args: joining: the engine whose keeper calls. If it fails again, nobody else would bring it back.
        """
        while True:
            if self.roster is not None and self._transport in _BROADCASTS:
                self.roster.wait_whole()
            numbers = list(range(len(self._engines))) if self.roster is None else self.roster.present()
            if self._transport in _BROADCASTS and len(numbers) < len(self._engines):
                raise WeightSyncError(
                    f"{len(numbers)} of {len(self._engines)} engines are left, and --update-weight-transport "
                    f"{self._transport} needs all that the run began with; begin again with fewer, or with disk"
                )
            try:
                return self._sync(numbers, version, probe=probe)
            except _DoAgain as error:
                if joining is not None and joining not in self._targets:
                    raise EngineDead(f"engine {joining} failed again while it got its weights: {error}") from error
                _log.warning("%s; it is done again when the engine is back", error)

    def _sync(self, numbers: list[int], version: PolicyVersion, *, probe: bool) -> Metrics:
        """Send, verify, and let these engines serve. Returns: metrics; empty when no engine is left."""
        self._targets = numbers
        if self._turns is not None:
            self._turns.to_sync()
        begin = time.monotonic()
        self._each("pause", lambda engine: engine.pause("keep"))
        names = self._trainer.weight_names()
        self._each("begin", lambda engine: engine.begin_weights(version, self._transport, names))
        sent = self._send(version)
        parts = self._each("commit", lambda engine: engine.commit(version))
        seconds = time.monotonic() - begin
        if self._turns is not None:
            self._turns.to_generation()
        self._each("resume", lambda engine: engine.resume())
        if not parts:
            return {}
        synced = time.monotonic()
        metrics = {
            "weight_sync/seconds": seconds,
            "weight_sync/gb_per_second": sent["weight_sync/bytes"] / 1e9 / seconds,
            **sent,
            **{f"weight_sync/{part}_seconds": max(one[part] for one in parts) for part in parts[0]},
        }
        if probe:
            metrics |= self._probe(version)
            metrics["weight_sync/probe_seconds"] = time.monotonic() - synced
        return metrics

    def take_spans(self) -> list[list[Span]]:
        """What each engine was busy with since the last call; for the trace."""
        return [log.take() for log in self._spans]

    def close(self) -> None:
        """Stop the threads; a call that an engine never answers ends with the engine, and is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, version: PolicyVersion) -> Metrics:
        """Every bucket to every engine. Returns: what was sent, and how long the trainer took over it."""
        num_bytes = num_buckets = 0
        gathering = 0.0
        receiving: Callable[[], list[None]] | None = None
        buckets = iter(self._trainer.weights(version))
        while self._targets:
            begin = time.monotonic()
            try:
                bucket = next(buckets, None)
            except WeightSyncError:
                if receiving is not None:
                    receiving()  # an engine that failed is the cause, and says more
                raise
            gathering += time.monotonic() - begin
            # Every engine has the one before, in whose place the next but one will lie.
            if receiving is not None:
                receiving()
            if bucket is None or not self._targets:
                break
            receiving = self._begin(
                f"bucket {bucket.index}",
                lambda engine, b=bucket: engine.receive(b),  # type: ignore[misc]
                on_failure=self._trainer.call_off_weights,
            )
            num_bytes += bucket.num_bytes
            num_buckets += 1
        if not self._targets:
            self._trainer.call_off_weights()  # nobody is left who would take them
        return {
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/buckets": float(num_buckets),
            "weight_sync/gather_seconds": gathering,
        }

    def _is_probe_due(self) -> bool:
        return bool(self._interval) and self._published % self._interval == 0

    def _probe(self, version: PolicyVersion) -> Metrics:
        """Verify; whatever the probe could not show leaves no engine fit to serve. Returns: metrics."""
        try:
            return self._verify(version)
        except _DoAgain:
            raise
        except WeightSyncError as error:
            reason = str(error)
            try:
                self._each("mark unfit", lambda engine: engine.mark_unfit(reason))
            except WeightSyncError as other:
                raise WeightSyncError(f"{reason}; {other}") from error
            raise

    def _verify(self, version: PolicyVersion) -> Metrics:
        probes = self._each("probe", lambda engine: engine.probe(self._prompts, PROBE_TOKENS))
        if not probes:
            return {}
        numbers = list(self._targets)
        with nullcontext() if self._turns is None else self._turns.scoring():
            # One call, because scoring is collective over the trainer's ranks.
            scores = self._trainer.score([sequence for probe in probes for sequence in probe_sequences(probe)])
        count = len(self._prompts)
        reports = [compare_probe(probe, scores[i * count : (i + 1) * count]) for i, probe in enumerate(probes)]
        worst: ProbeReport = max(reports, key=self._tolerance.value)
        if self._tolerance.exceeded(worst):
            raise WeightSyncError(
                f"the probe of version {version} failed on engine {numbers[reports.index(worst)]}: over "
                f"{worst.num_tokens} tokens log-probs differ by {worst.mean:.3g} in the mean and {worst.max:.3g} at "
                f"most (allowed: {self._tolerance.statistic} {self._tolerance.bound:.3g}); {worst.worst}. The engine "
                "does not compute with the trainer's weights; if their arithmetic is known to differ so much, raise "
                "--weight-probe-tolerance"
            )
        return {
            "weight_sync/probe_abs_diff_max": max(report.max for report in reports),
            "weight_sync/probe_abs_diff_mean": sum(r.mean for r in reports) / len(reports),
        }

    def _each(self, step: str, call: Callable[[Engine], _T]) -> list[_T]:
        """Call every engine of the sync at once and wait for all. Raises: WeightSyncError with every engine's problem.

        Returns: the results of those that are still there, in the order of `_targets`.
        """
        return self._begin(step, call)()

    def _begin(
        self, step: str, call: Callable[[Engine], _T], *, on_failure: Callable[[], None] | None = None
    ) -> Callable[[], list[_T]]:
        """Call every engine at once. Returns: what waits for all, and raises WeightSyncError with every problem.

        Args: on_failure: called once when the sync has failed, as soon as an engine did while others may wait for it.
        """

        def timed(number: int) -> _T:
            with self._spans[number].span(step):
                return call(self._engines[number])

        futures = {number: self._pool.submit(timed, number) for number in self._targets}

        def results() -> list[_T]:
            is_called_off = False
            if on_failure is not None and (self.roster is None or self._transport in _BROADCASTS):
                done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
                is_called_off = any(future.exception() for future in done)
                if is_called_off:
                    on_failure()
            problems = [(number, error) for number, future in futures.items() if (error := future.exception())]
            lost = [number for number, error in problems if self.roster is not None and self.roster.lost(number, error)]
            self._targets = [number for number in self._targets if number not in lost]
            told = "; ".join(f"engine {number}: {error}" for number, error in problems)
            if lost and self._transport in _BROADCASTS:
                raise _DoAgain(f"weight sync, {step}: {told}")
            if len(problems) > len(lost):
                if on_failure is not None and not is_called_off:
                    on_failure()
                raise WeightSyncError(f"weight sync, {step}: {told}") from problems[0][1]
            return [future.result() for number, future in futures.items() if number not in lost]

        return results
