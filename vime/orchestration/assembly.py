"""Builds the objects of a run while its engines start, and runs the loop.

Engines and trainer start at the same time (both take long); on shared devices one after the other. The data are read
meanwhile, then come the first weight sync and the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from vime.config import modes
from vime.config.eval_sets import has_eval_sets
from vime.config.hf import load_tokenizer
from vime.config.parallel import parallel_sizes
from vime.data.journaled import JournaledSource
from vime.data.prompts import CheckedRows
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.versions import adapter_for
from vime.errors import EngineError, WeightSyncError
from vime.loop.batch import make_train_batch
from vime.loop.batch_hooks import BatchHooks
from vime.loop.cadence import Cadence, StopRule
from vime.loop.evaluation_only import run_evaluation_only
from vime.loop.fully_async import run_fully_async
from vime.loop.keeper import CheckpointKeeper, remove_leftovers
from vime.loop.overlapped import run_overlapped
from vime.loop.recorder import Copies, Recorder, RewardKeys
from vime.loop.rollout_only import run_rollout_only
from vime.loop.staleness import version_after
from vime.loop.sync import Publisher, Rollout, Stages, run_sync
from vime.loop.turns import DeviceTurns
from vime.models import family_of
from vime.observability.writers import MetricWriter
from vime.orchestration import resume, sizes
from vime.orchestration.critic_group import TrainerWithCritic, make_trainer
from vime.orchestration.current_weights import CurrentWeights
from vime.orchestration.data import build_source, probe_prompts
from vime.orchestration.fleet import Fleet
from vime.orchestration.journal import journaled_source
from vime.orchestration.no_engines import NoEngines
from vime.orchestration.run_plan import RunPlan, Started
from vime.orchestration.sharing import start_sides
from vime.orchestration.stream import make_stream
from vime.orchestration.telemetry import make_meter, make_tracer, make_writer
from vime.orchestration.workers import TrainerGroup
from vime.protocols import DataSource, Engines, RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.score import make_reward_function
from vime.rollout.eval_data import HeldOutSet, load_eval_sets
from vime.rollout.stage import RolloutStage
from vime.rollout.stream import RolloutStream
from vime.rollout.teacher import ServedTeacher
from vime.types import Group, Metrics, TrainBatch
from vime.weight_sync.plan import WeightSync


def run_on(
    plan: RunPlan,
    started: Started,
    stack: ExitStack,
    *,
    rows: CheckedRows | None,
    changed: Sequence[str],
    replayed: Rollout | None,
    teacher: ServedTeacher | None,
) -> None:
    """Build the rest of a run beside what has been started, and run it to its end.

    Args:
        stack: ends what is started here, and before here, in reverse.
        rows: the checked prompts to train on; None where the run has no use for them.
        changed: settings that differ from the checkpoint's, in words.
        replayed: rollouts that were saved, in place of new ones.
        teacher: the server that rollouts ask for its log-probs; None where there is none.
    """
    config, checkpoint, fleet, progress = plan.config, plan.checkpoint, started.fleet, plan.progress
    with plan.times.part("data"):
        writer = stack.enter_context(closing(make_writer(config, plan.folder)))
        goes_on = checkpoint is not None and not config.checkpoint.finetune
        if checkpoint and goes_on and plan.folder.lacks_row(checkpoint.rollout_id):
            writer.write(checkpoint.rollout_id, dict(checkpoint.metrics))
        tokenizer = load_tokenizer(plan.hf_path)
        source = build_source(config, rows, tokenizer, checkpoint.data_source if checkpoint and goes_on else None)
        journaled = journaled_source(plan, source, checkpoint if goes_on else None, stack)
        source = source if journaled is None else journaled
        eval_sets = load_eval_sets(config, tokenizer) if plan.generates else {}
        num_rollout = sizes.number_of_rollouts(config, source.epoch_size())
    progress.expect(num_rollout)
    if not plan.layout.trainer_devices:
        _run_without_trainer(plan, fleet, source, eval_sets, tokenizer, writer, stack, num_rollout=num_rollout)
        return
    if config.checkpoint.save is not None:
        # Of a save that was under way: when the ranks have ended, which write it.
        stack.callback(remove_leftovers, Path(config.checkpoint.save))
    trainer = make_trainer(
        config,
        started.placement,
        started.reservation,
        started.platform,
        hf_path=str(plan.hf_path),
        model=family_of(plan.hf_config).settings(plan.hf_config),
        total_steps=num_rollout * sizes.steps_per_rollout(config),
        route=started.route,
    )
    stack.callback(trainer.close)
    client, turns = start_sides(config, started.devices, trainer, fleet, progress, plan.times)
    train = config.train
    stop = StopRule(train.stop_metric, below=train.stop_below, above=train.stop_above, window=train.stop_window)
    if checkpoint is not None:
        with plan.times.part("resume"):
            progress.message(resume.load(config, checkpoint, trainer, source, stop, changed=changed))
    if journaled is not None and journaled.resumed is not None:
        progress.message(f"journal: {journaled.resumed}")
    context = _hook_context(plan, client, tokenizer, stack)
    rollout = replayed or RolloutStage(
        context,
        source,
        eval_sets,
        make_meter(config, fleet, client),
        call_off=client.call_off if client is not None else None,
        teacher=teacher,
    )
    keeper = stack.enter_context(_keeper(plan, trainer, source, stop, journaled))
    stages = Stages(
        rollout=rollout,
        trainer=trainer,
        publisher=_publisher(plan, started, context, source, trainer, client, turns, stack),
        make_batch=_batch_maker(plan, context),
        checkpoints=keeper,
        turns=turns,
    )
    with _naming_the_dead(fleet):
        recorder = _recorder(plan, writer, stack, fleet, stages.rollout, stages.publisher, trainer)
        stream = None
        if config.stream.fully_async and isinstance(rollout, RolloutStage):
            stream = make_stream(config, context, rollout, source, num_rollout=num_rollout - plan.start)
        last = _loop(plan, stages, recorder, stop, num_rollout, stream)
    if stop.is_met:
        progress.message(f"ended by --stop-metric after rollout {last + 1} of {num_rollout}: {stop}")
    if last < plan.start and config.checkpoint.save_hf is not None:
        if turns is not None:
            turns.to_training(weights_follow=True)
        keeper.export_hf(last)  # nothing was left to train, so no step has exported it


def _run_without_trainer(
    plan: RunPlan,
    fleet: Fleet | None,
    source: DataSource,
    eval_sets: dict[str, HeldOutSet],
    tokenizer: Any,
    writer: MetricWriter,
    stack: ExitStack,
    *,
    num_rollout: int,
) -> None:
    """Make rollouts, or evaluate the checkpoint once."""
    config = plan.config
    client = fleet.wait_ready(config.log.engine_start_timeout_s) if fleet is not None else None
    if fleet is not None and client is not None:
        fleet.keep_going(client, give_weights=lambda _: None)  # a new server has the checkpoint's
    context = _hook_context(plan, client, tokenizer, stack)
    stage = RolloutStage(context, source, eval_sets, make_meter(config, fleet, client))
    recorder = _recorder(plan, writer, stack, fleet, rollout=stage)
    with _naming_the_dead(fleet):
        if modes.evaluates_only(config):
            plan.progress.message(f"evaluating {plan.hf_path} as it is; nothing is trained or saved")
            run_evaluation_only(stage, recorder, rollout_id=-1)
        else:
            run_rollout_only(stage, recorder, start=plan.start, num_rollout=num_rollout)


@contextmanager
def _naming_the_dead(fleet: Fleet | None) -> Iterator[None]:
    """An engine that died is the better explanation for what failed because of it."""
    try:
        yield
    except (EngineError, WeightSyncError):
        if fleet is not None:
            fleet.check_alive()
        raise


def _hook_context(plan: RunPlan, client: RouterClient | None, tokenizer: Any, stack: ExitStack) -> RolloutContext:
    """What users' functions get as `config`."""
    config = plan.config
    pool = GraderPool(config.reward.rm_num_workers, config.reward.rm_timeout_s, config.reward.rm_memory_limit_bytes)
    stack.callback(pool.close)
    endpoint: Engines = client if client is not None else NoEngines()
    reward = make_reward_function(config.reward, pool)
    stack.callback(reward.close)
    return RolloutContext(config, endpoint, tokenizer, reward)


def _publisher(
    plan: RunPlan,
    started: Started,
    context: RolloutContext,
    source: DataSource,
    trainer: TrainerGroup,
    client: RouterClient | None,
    turns: DeviceTurns | None,
    stack: ExitStack,
) -> Publisher:
    """The weight sync, where the run has engines, which are kept going from now on."""
    config, fleet, route = plan.config, started.fleet, started.route
    if turns is not None:
        stack.callback(turns.close)
    if fleet is None or client is None or route is None:
        return NoEngines()
    sync = WeightSync(
        trainer,
        list(fleet.engines),
        transport=route.transport,
        probe_prompts=probe_prompts(source, context.tokenizer, sizes.max_model_len(config, plan.hf_config)),
        probe_interval=config.sync.weight_probe_interval,
        probe_tolerance=sizes.probe_tolerance(config, plan.hf_config),
        on_version=client.note_version,
        turns=turns,
        lock=trainer.lock,
    )
    stack.callback(sync.close)
    _keep_going(plan, fleet, client, trainer, sync, turns)
    return sync


def _batch_maker(plan: RunPlan, context: RolloutContext) -> Callable[[int, list[Group]], tuple[TrainBatch, Metrics]]:
    """`make_train_batch` as the run is configured."""
    config = plan.config
    hooks = BatchHooks.load(context)
    model = family_of(plan.hf_config).settings(plan.hf_config)

    def make_batch(rollout_id: int, groups: list[Group]) -> tuple[TrainBatch, Metrics]:
        return make_train_batch(
            groups,
            rollout_id=rollout_id,
            algo=config.algo,
            train=config.train,
            dp_size=sizes.data_parallel_size(config, len(plan.layout.trainer_devices)),
            sizes=parallel_sizes(config.megatron),
            model=model,
            reward_key=config.reward.reward_key,
            global_batch_size=sizes.global_batch_size(config),
            hooks=hooks,
            max_response_len=config.rollout.rollout_max_response_len,
            needs_support=modes.samples_narrowly(config),
            mixes_versions=config.stream.fully_async,
        )

    return make_batch


def _keep_going(
    plan: RunPlan,
    fleet: Fleet,
    client: RouterClient,
    trainer: TrainerGroup,
    sync: WeightSync,
    turns: DeviceTurns | None,
) -> None:
    """Engines and router are restarted from now on, and the engines get the trainer's weights."""
    weights = CurrentWeights(
        trainer,
        sync,
        start=plan.start,
        tells_versions=adapter_for().reports_version_spans,
        num_serving=lambda: len(fleet.roster.serving()) if fleet.roster is not None else 0,
        is_joining=lambda number: fleet.roster is None or fleet.roster.is_joining(number),
        on_version=client.note_version,
    )
    place: Callable[[], AbstractContextManager[object]] = nullcontext
    if plan.layout.shared and not sync.waits_for_all:
        # vLLM measures its device when it starts: nobody may take or give memory there meanwhile. Where a sync waits
        # for the restart, in the trainer's turn, the restart cannot wait for the end of that turn.
        place = turns.generating if turns is not None else lambda: trainer.lock
    sync.roster = fleet.keep_going(client, weights.give, place)
    if turns is not None:
        turns.roster = sync.roster


def _keeper(
    plan: RunPlan, trainer: TrainerGroup, source: DataSource, stop: StopRule, journaled: JournaledSource | None
) -> CheckpointKeeper:
    settings = plan.config.checkpoint
    return CheckpointKeeper(
        trainer,
        source,
        stop,
        folder=None if settings.save is None else Path(settings.save),
        settings=plan.kept_settings,
        hf_path=settings.save_hf,
        keep_last=settings.keep_last_checkpoints,
        keep_best=settings.keep_best_checkpoint,
        in_background=settings.async_save,
        checksums=not settings.no_save_checksums,
        journaled=journaled,
    )


def _loop(
    plan: RunPlan,
    stages: Stages,
    recorder: Recorder,
    stop: StopRule,
    num_rollout: int,
    stream: RolloutStream | None,
) -> int:
    config = plan.config
    evaluates = plan.generates and has_eval_sets(config)
    cadence = Cadence(
        num_rollout,
        config.eval.eval_interval,
        config.checkpoint.save_interval,
        evaluates=evaluates,
        saves=config.checkpoint.save is not None,
        export_interval=config.checkpoint.save_hf_interval,
        exports=config.checkpoint.save_hf is not None,
        publish_interval=config.sync.update_weights_interval,
    )
    if modes.evaluates_only(config):
        plan.progress.message("evaluating the checkpoint as it is; nothing is trained")
        stages.publisher.publish(version_after(plan.start - 1))
        if evaluates:
            run_evaluation_only(stages.rollout, recorder, rollout_id=plan.start - 1)
        return plan.start - 1
    loop = run_overlapped if plan.overlapped else run_sync
    if stream is not None:
        loop = partial(run_fully_async, stream=stream)
    return loop(
        stages,
        cadence,
        recorder,
        start=plan.start,
        eval_before=evaluates and not config.eval.skip_eval_before_train,
        stop=stop,
    )


def _recorder(
    plan: RunPlan,
    writer: MetricWriter,
    stack: ExitStack,
    fleet: Fleet | None,
    rollout: Rollout,
    publisher: Publisher | None = None,
    trainer: TrainerGroup | None = None,
) -> Recorder:
    config = plan.config
    tracer = make_tracer(
        config,
        plan.folder,
        plan.start,
        trainer=trainer.take_spans if trainer is not None else None,
        critic=trainer.take_critic_spans if isinstance(trainer, TrainerWithCritic) else None,
        engines=[
            part.take_spans
            for part in (publisher, rollout, fleet)
            if isinstance(part, WeightSync | RolloutStage | Fleet)
        ],
    )
    if tracer is not None:
        stack.callback(tracer.close)
    return Recorder(
        plan.folder,
        plan.progress,
        writer,
        keep_rollouts=not config.log.no_save_rollouts,
        copies=Copies(modes.rollout_data_to_save(config), modes.train_data_to_save(config)),
        tracer=tracer,
        reward_keys=RewardKeys(config.reward.reward_key, config.eval.eval_reward_key),
        times=plan.times,
    )
