"""What a run measures and where it is written: built from the settings, closed with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from vime.config import Config
from vime.engine.vllm.client import RouterClient
from vime.observability.run_folder import RunFolder, plain_settings
from vime.observability.trace import Span
from vime.observability.trace_file import RunTracer, TraceFile
from vime.observability.wandb_writer import WandbWriter, find_run_id
from vime.observability.writers import JsonlWriter, MetricWriter, MultiWriter, TensorBoardWriter
from vime.orchestration.fleet import Fleet
from vime.rollout.meter import RolloutMeter
from vime.types import Metrics

_MIB = 1 << 20


def make_meter(config: Config, fleet: Fleet | None, client: RouterClient | None) -> RolloutMeter | None:
    """Measures rollouts; None where there are no engines."""
    if fleet is None or client is None:
        return None
    return RolloutMeter(
        read_stats=fleet.stats,
        num_requests=lambda: client.counters["requests"] + sum(engine.num_probes for engine in fleet.engines),
        activity=client.activity,
        num_devices=fleet.num_devices,
        reward_key=config.reward.reward_key,
        take_counts=_TroubleCounts(fleet, client).take,
    )


class _TroubleCounts:
    """What went wrong with engines, router and requests, and was mended."""

    def __init__(self, fleet: Fleet, client: RouterClient) -> None:
        self._fleet, self._client = fleet, client
        self._told: Counter[str] = Counter()

    def take(self) -> Metrics:
        """Counts since the last call."""
        restarts = self._fleet.roster.restarts if self._fleet.roster is not None else Counter()
        now = Counter(
            {
                "rollout/retries": self._client.counters["retries"],
                "rollout/engine_restarts": restarts["engine"],
                "rollout/router_restarts": restarts["router"],
            }
        )
        metrics = {name: float(count - self._told[name]) for name, count in now.items()}
        self._told = now
        return metrics


def make_writer(config: Config, folder: RunFolder) -> MetricWriter:
    """metrics.jsonl, and TensorBoard and Weights & Biases where they are wanted."""
    log, checkpoint = config.log, config.checkpoint
    writers: list[MetricWriter] = [JsonlWriter(folder.metrics_path)]
    if log.use_tensorboard:
        writers.append(TensorBoardWriter(folder.tensorboard_path))
    if log.use_wandb:
        # A resumed run goes on in the same W&B run, whose id lies beside its checkpoints.
        places = [Path(p) for p in (checkpoint.load, folder.path) if p is not None]
        resumed = find_run_id(places) if checkpoint.load is not None else None
        writers.append(
            WandbWriter(
                folder=folder.path,
                keep_id_in=[folder.path, *([Path(checkpoint.save)] if checkpoint.save is not None else [])],
                run_id=log.wandb_run_id or resumed,
                settings=plain_settings(config),
                mode=cast(Any, log.wandb_mode),  # one of the flag's choices
                directory=Path(log.wandb_dir) if log.wandb_dir is not None else folder.path,
                project=log.wandb_project,
                group=log.wandb_group,
                entity=log.wandb_team,
                host=log.wandb_host,
            )
        )
    return MultiWriter(*writers)


def make_tracer(
    config: Config,
    folder: RunFolder,
    start: int,
    *,
    trainer: Callable[[], Sequence[Sequence[Span]]] | None,
    critic: Callable[[], Sequence[Sequence[Span]]] | None,
    engines: Sequence[Callable[[], Sequence[Sequence[Span]]]],
) -> RunTracer | None:
    """Writes trace_<first rollout>.json into the run folder; None without --trace.

    Args: trainer, critic (of ranks of its own), engines: give the spans since the last call, a list for each rank or
        engine; those of several calls go to one track.
    """
    if not config.log.trace:
        return None
    file = TraceFile(folder.path / f"trace_{start:06d}.json", config.log.trace_max_mib * _MIB)
    sources: dict[str, Callable[[], Sequence[Sequence[Span]]]] = {"engines": lambda: _merged([t() for t in engines])}
    ranks = {"trainer": trainer, "critic": critic}
    return RunTracer(file, sources | {name: take for name, take in ranks.items() if take is not None})


def _merged(sources: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """For each engine, its spans from all sources; one that has none at all says nothing of how many there are."""
    return [[span for part in parts for span in part] for parts in zip_longest(*sources, fillvalue=())]
