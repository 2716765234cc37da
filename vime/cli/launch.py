"""What `train.py` and `train_async.py` do: resolve the settings, make the run folder, run."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vime.config import ClusterConfig, Config
from vime.config.eval_sets import eval_sets
from vime.errors import ConfigError, VimeError
from vime.loop.folder_lock import only_run_in
from vime.observability.start_times import StartTimes
from vime.platform import get_platform


def main(argv: Sequence[str], *, overlapped: bool = False, begin: float | None = None) -> int:
    """Run with these flags, with `overlapped` one rollout ahead of the trainer.

    Args: begin: time.perf_counter() when the program started; None for now.
    Returns the exit code: 0 done, 1 failed, 2 wrong settings, 130 interrupted."""
    times = StartTimes(begin)
    try:
        with times.part("settings"):
            from vime.cli.resolve import resolve

            resolved = resolve(argv, overlapped=overlapped)
            _check_machine(resolved.config.cluster)
    except ConfigError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("vime: interrupted; nothing had been started", file=sys.stderr)
        return 130

    from vime.observability.progress import RunProgress
    from vime.observability.run_folder import RunFolder

    path = Path(resolved.config.log.run_dir.format(time=time.strftime("%Y%m%d-%H%M%S"))).resolve()
    config = _absolute(resolved.config, path)
    metrics = path / "metrics.jsonl"  # empty: a run that failed before its first step
    if metrics.exists() and metrics.stat().st_size > 0 and config.checkpoint.load is None:
        return _report(
            ConfigError(
                f"--run-dir {path} holds the metrics of another run; choose another folder, or resume with --load"
            )
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end cleanly, as with ctrl-C
    folder: RunFolder | None = None
    try:
        folder = RunFolder(path)
        program = "train_async.py" if overlapped else "train.py"
        with only_run_in(path, "--run-dir"), RunProgress(config.rollout.num_rollout or 0) as progress:
            folder.write_config(
                {"program": program, "settings": config, "eval_sets": eval_sets(config), "origin": resolved.origin}
            )
            folder.write_versions()
            progress.message(f"run folder {path}")
            with times.part("imports"):
                from vime.orchestration import ray_environment

                ray_environment.prepare(config.cluster)
                from vime.orchestration.launch import run  # imports Ray

            run_begin = time.monotonic()
            run(config, folder=folder, progress=progress, overlapped=overlapped, times=times)
            progress.message(f"done in {time.monotonic() - run_begin:.0f} s; metrics in {folder.metrics_path}")
    except ConfigError as error:
        if folder is not None:
            folder.remove_unused()
        return _report(error)
    except VimeError as error:
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"vime: {note}", file=sys.stderr)
        print(f"vime: the run's folder, with logs of its engines: {path}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, most often
        print(f"vime: {type(error).__name__}: {error}; the run's folder: {path}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vime: interrupted; every process of the run was ended", file=sys.stderr)
        return 130
    return 0


def _check_machine(cluster: ClusterConfig) -> None:
    """Raises: ConfigError with what this machine lacks, where the run's processes start on it."""
    if cluster.ray_address is None and (missing := get_platform(cluster.platform).missing()):
        raise ConfigError(missing)


def _absolute(config: Config, run_dir: Path) -> Config:
    """Every path that another process writes or reads, spelt so that its working directory does not matter."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(path).resolve())

    old = config.checkpoint
    checkpoint = replace(
        old, ref_load=full(old.ref_load), load=full(old.load), save=full(old.save), save_hf=full(old.save_hf)
    )
    critic = replace(config.critic, critic_load=full(config.critic.critic_load))
    teacher = replace(
        config.teacher,
        opd_teacher_load=full(config.teacher.opd_teacher_load),
        opd_teacher_key_file=full(config.teacher.opd_teacher_key_file),
    )
    sync = replace(config.sync, update_weight_disk_dir=full(config.sync.update_weight_disk_dir))
    debug = replace(
        config.debug,
        save_debug_rollout_data=full(config.debug.save_debug_rollout_data),
        load_debug_rollout_data=full(config.debug.load_debug_rollout_data),
        save_debug_train_data=full(config.debug.save_debug_train_data),
        dump_details=full(config.debug.dump_details),
        memory_snapshot_dir=full(config.debug.memory_snapshot_dir),
    )
    log = replace(config.log, run_dir=str(run_dir), wandb_dir=full(config.log.wandb_dir))
    return replace(config, checkpoint=checkpoint, critic=critic, teacher=teacher, sync=sync, debug=debug, log=log)


def _report(error: ConfigError) -> int:
    print(f"vime: {len(error.problems)} problem(s) with the settings:", file=sys.stderr)
    for problem in error.problems:
        print(f"  - {problem}", file=sys.stderr)
    return 2
