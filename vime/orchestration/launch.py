"""Starts the processes of a run, then hands over to assembly.py, and ends what was started.

Order matters: the data are checked before anything starts; then Ray, then the engines, which take longest. What is
imported here takes a second, torch and transformers none of it: they are imported while the engines start. Whatever
was started is ended in reverse, also after an error or ctrl-C.
"""

from __future__ import annotations

import json
import secrets
from contextlib import ExitStack
from pathlib import Path

from vime.config import Config, modes
from vime.config.critic_ranks import critic_ranks
from vime.config.dtype import run_dtype
from vime.config.hf import local_checkpoint
from vime.config.validate_teacher import teacher_is_served
from vime.loop.compatibility import settings_to_keep
from vime.loop.folder_lock import only_run_in
from vime.observability.progress import RunProgress
from vime.observability.run_folder import RunFolder
from vime.observability.start_times import StartTimes
from vime.orchestration import resume
from vime.orchestration.cluster import Reservation, plan_placement, ray_cluster, reserve
from vime.orchestration.data import check_data
from vime.orchestration.engines import EngineFleet
from vime.orchestration.external import ExternalFleet
from vime.orchestration.fleet import Fleet
from vime.orchestration.placement import Layout, Placement, describe, plan_layout
from vime.orchestration.route import route_weights
from vime.orchestration.run_plan import RunPlan, Started
from vime.orchestration.sharing import DevicePlan, plan_devices
from vime.platform import get_platform
from vime.platform.base import Platform
from vime.weight_sync.segments import remove_stale_segments


def run(
    config: Config,
    *,
    folder: RunFolder,
    progress: RunProgress,
    overlapped: bool = False,
    times: StartTimes | None = None,
) -> None:
    """Run `config` to its end.

    Args:
        config: resolved and checked.
        folder: the run's folder.
        progress: where to say what is going on.
        overlapped: generate each rollout while the one before is trained on.
        times: of the program's start; None begins now.
    Raises: ConfigError before any process starts; whatever a stage raises afterwards, once everything was ended.
    """
    times = times or StartTimes()
    platform = get_platform(config.cluster.platform)
    with times.part("data"):
        plan = _plan(config, folder, progress, times, overlapped=overlapped)
        progress.message("checking the data")
        rows = check_data(config)
        checkpoint = plan.checkpoint
        changed = resume.check_settings(config, checkpoint, plan.kept_settings) if checkpoint is not None else []
        replayed = resume.replayed_rollouts(config, plan.start)
        teacher = None
        if teacher_is_served(config):
            # It imports transformers, for its check of the tokenizer.
            from vime.orchestration.teacher import served_teacher

            teacher = served_teacher(config, plan.hf_path, plan.hf_config)
    with ExitStack() as stack:
        if config.checkpoint.save is not None and plan.layout.trainer_devices:
            stack.enter_context(only_run_in(Path(config.checkpoint.save)))
        stack.callback(remove_stale_segments)  # of a rank that was killed; last of all, when no rank is left
        with times.part("ray"):
            started = _start(plan, platform, stack)
        with times.part("imports"):  # torch and transformers, while the engines start
            from vime.orchestration.assembly import run_on

        run_on(plan, started, stack, rows=rows, changed=changed, replayed=replayed, teacher=teacher)


def _plan(config: Config, folder: RunFolder, progress: RunProgress, times: StartTimes, *, overlapped: bool) -> RunPlan:
    hf_path = local_checkpoint(config.checkpoint.hf_checkpoint)
    hf_config = json.loads((hf_path / "config.json").read_text(encoding="utf-8"))
    generates = modes.generates(config)
    external = bool(config.cluster.rollout_external_engine_addrs)
    checkpoint = resume.checkpoint_to_load(config)
    return RunPlan(
        config=config,
        hf_path=hf_path,
        hf_config=hf_config,
        layout=plan_layout(
            config.cluster,
            with_engines=generates and not external,
            with_trainer=modes.trains(config),
            critic=critic_ranks(config),
        ),
        folder=folder,
        progress=progress,
        generates=generates,
        overlapped=overlapped,
        checkpoint=checkpoint,
        start=resume.first_rollout(config, checkpoint),
        kept_settings=settings_to_keep(config, hf_config, dtype=run_dtype(config.megatron, hf_config)),
        times=times,
    )


def _start(plan: RunPlan, platform: Platform, stack: ExitStack) -> Started:
    """Ray, the run's devices, and the engines, which are not waited for."""
    config, progress = plan.config, plan.progress
    fleet: Fleet | None = None
    if plan.generates and config.cluster.rollout_external_engine_addrs:
        fleet = ExternalFleet(config, hf_config=plan.hf_config, log_dir=plan.folder.path / "logs")
        stack.callback(fleet.close)
    progress.message("starting Ray")
    stack.enter_context(ray_cluster(config.cluster, plan.layout))
    placement = plan_placement(config.cluster, platform, plan.layout)
    route = None
    if plan.generates and plan.layout.trainer_devices:
        route = route_weights(config, placement, platform.transports, fleet)
        progress.message(describe(placement, route.transport, route.why))
    reservation = reserve(platform, placement)
    devices = plan_devices(config, plan.hf_config, plan.layout, platform, progress)
    progress.message(_what_starts(plan.layout))
    if plan.generates and fleet is None:
        fleet = _start_fleet(plan, platform, placement, reservation, devices, stack)
    return Started(platform, placement, reservation, route, devices, fleet)


def _start_fleet(
    plan: RunPlan,
    platform: Platform,
    placement: Placement,
    reservation: Reservation,
    devices: DevicePlan | None,
    stack: ExitStack,
) -> EngineFleet:
    fleet = EngineFleet(
        plan.config,
        placement,
        reservation,
        platform,
        hf_path=str(plan.hf_path),
        hf_config=plan.hf_config,
        key=secrets.token_urlsafe(32),
        log_dir=plan.folder.path / "logs",
        sharing=devices.engine_arguments(plan.config) if devices is not None else None,
    )
    stack.callback(fleet.close)
    return fleet


def _what_starts(layout: Layout) -> str:
    if not layout.trainer_devices:
        return "starting the engines" if layout.engine_devices else "making the samples"
    return "starting trainer and engines" if layout.engine_devices else "starting the trainer"
