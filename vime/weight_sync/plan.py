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

The probe comes after resume because a paused vLLM generates nothing. If it fails, the engines are paused again and
refuse to serve, and the run ends: nothing sampled in between is trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

from vime.errors import WeightSyncError
from vime.observability.trace import Span, SpanLog
from vime.protocols import Engine, Trainer, Turns
from vime.types import Metrics, PolicyVersion
from vime.weight_sync.verify import PROBE_TOKENS, ProbeReport, ProbeTolerance, compare_probe, probe_sequences

_T = TypeVar("_T")


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
        self._spans = [SpanLog() for _ in self._engines]
        self.version: PolicyVersion = 0
        self.metrics: Metrics = {}

    def publish(self, version: PolicyVersion | None = None) -> PolicyVersion:
        """Send the trainer's weights to every engine, verify them, and only then count them as this version.

        Args: version: above the last one; default: one more.
        Returns: the new version.
        Raises: WeightSyncError naming engine and tensors; the engines then stay paused and refuse to serve.
        """
        version = self.version + 1 if version is None else version
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
        synced = time.monotonic()
        self.metrics = {
            "weight_sync/seconds": seconds,
            "weight_sync/gb_per_second": sent["weight_sync/bytes"] / 1e9 / seconds,
            **sent,
            **{f"weight_sync/{part}_seconds": max(one[part] for one in parts) for part in parts[0]},
        }
        if self._is_probe_due():
            self._probe(version)
            self.metrics["weight_sync/probe_seconds"] = time.monotonic() - synced
        self.version = version
        if self._on_version is not None:
            self._on_version(version)
        self._published += 1
        return version

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
        while True:
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
            if bucket is None:
                break
            receiving = self._begin(
                f"bucket {bucket.index}",
                lambda engine, b=bucket: engine.receive(b),  # type: ignore[misc]
                on_failure=self._trainer.call_off_weights,
            )
            num_bytes += bucket.num_bytes
            num_buckets += 1
        return {
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/buckets": float(num_buckets),
            "weight_sync/gather_seconds": gathering,
        }

    def _is_probe_due(self) -> bool:
        return bool(self._interval) and self._published % self._interval == 0

    def _probe(self, version: PolicyVersion) -> None:
        """Verify; whatever the probe could not show leaves no engine fit to serve."""
        try:
            self._verify(version)
        except WeightSyncError as error:
            reason = str(error)
            try:
                self._each("mark unfit", lambda engine: engine.mark_unfit(reason))
            except WeightSyncError as other:
                raise WeightSyncError(f"{reason}; {other}") from error
            raise

    def _verify(self, version: PolicyVersion) -> None:
        probes = self._each("probe", lambda engine: engine.probe(self._prompts, PROBE_TOKENS))
        with nullcontext() if self._turns is None else self._turns.scoring():
            # One call, because scoring is collective over the trainer's ranks.
            scores = self._trainer.score([sequence for probe in probes for sequence in probe_sequences(probe)])
        count = len(self._prompts)
        reports = [compare_probe(probe, scores[i * count : (i + 1) * count]) for i, probe in enumerate(probes)]
        worst: ProbeReport = max(reports, key=self._tolerance.value)
        self.metrics["weight_sync/probe_abs_diff_max"] = max(report.max for report in reports)
        self.metrics["weight_sync/probe_abs_diff_mean"] = sum(r.mean for r in reports) / len(reports)
        if self._tolerance.exceeded(worst):
            raise WeightSyncError(
                f"the probe of version {version} failed on engine {reports.index(worst)}: over {worst.num_tokens} "
                f"tokens log-probs differ by {worst.mean:.3g} in the mean and {worst.max:.3g} at most (allowed: "
                f"{self._tolerance.statistic} {self._tolerance.bound:.3g}); {worst.worst}. The engine does not compute "
                "with the trainer's weights; if their arithmetic is known to differ so much, raise "
                "--weight-probe-tolerance"
            )

    def _each(self, step: str, call: Callable[[Engine], _T]) -> list[_T]:
        """Call every engine at once and wait for all. Raises: WeightSyncError with every engine's problem."""
        return self._begin(step, call)()

    def _begin(
        self, step: str, call: Callable[[Engine], _T], *, on_failure: Callable[[], None] | None = None
    ) -> Callable[[], list[_T]]:
        """Call every engine at once. Returns: what waits for all, and raises WeightSyncError with every problem.

        Args: on_failure: called once, as soon as an engine failed while others may still be waiting for it.
        """

        def timed(number: int) -> _T:
            with self._spans[number].span(step):
                return call(self._engines[number])

        futures = [self._pool.submit(timed, number) for number in range(len(self._engines))]

        def results() -> list[_T]:
            if on_failure is not None:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                if any(future.exception() for future in done):
                    on_failure()
            problems = [(number, error) for number, future in enumerate(futures) if (error := future.exception())]
            if problems:
                told = "; ".join(f"engine {number}: {error}" for number, error in problems)
                raise WeightSyncError(f"weight sync, {step}: {told}") from problems[0][1]
            return [future.result() for future in futures]

        return results
