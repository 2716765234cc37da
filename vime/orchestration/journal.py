"""The journal of a run: where it is, which one a resume goes on with, and what of it may be used again."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime.config import Config, modes
from vime.data.journal import Journal
from vime.data.journal_schema import FILE, copy_journal, set_aside
from vime.data.journaled import KEY, JournaledSource
from vime.errors import DataError
from vime.loop.checkpoint import Checkpoint
from vime.loop.replay import NoPrompts
from vime.loop.staleness import version_after
from vime.observability.run_folder import plain_settings
from vime.orchestration.run_plan import RunPlan
from vime.protocols import DataSource

# The rollout functions that train on finished groups as get_groups hands them out after a resume.
_USES_FINISHED = ("vime.rollout.vllm_rollout.generate_rollout",)
# What a group is does not depend on these.
_FREE = frozenset(
    {
        *("num_rollout", "num_epoch", "start_rollout_id", "rollout_batch_size", "over_sampling_batch_size"),
        *("rollout_concurrency", "rm_num_workers", "rm_timeout_s", "rm_memory_limit_bytes", "custom_rm_timeout_s"),
        *("rm_url_timeout_s", "rm_url_max_retries", "rm_url_max_connections", "custom_generate_timeout_s"),
        *("custom_rollout_log_function_path", "custom_eval_rollout_log_function_path", "eval_function_path"),
    }
)


def journal_path(config: Config, run_folder: Path) -> Path:
    """Beside the checkpoints, which outlive a run folder; without any in the run folder."""
    save = config.checkpoint.save
    return (run_folder if save is None else Path(save)) / FILE


def journaled_source(
    plan: RunPlan, source: DataSource, checkpoint: Checkpoint | None, stack: ExitStack
) -> JournaledSource | None:
    """The run's source with its journal; None where no prompts are taken to train on.

    Args:
        checkpoint: that the run goes on from; None: its data begin anew.
        stack: closes the journal.
    """
    if isinstance(source, NoPrompts) or modes.evaluates_only(plan.config):
        return None
    journaled, messages = with_journal(plan.config, source, checkpoint, plan.start, plan.folder.path)
    stack.callback(journaled.journal.close)
    for message in messages:
        plan.progress.message(message)
    return journaled


def with_journal(
    config: Config, source: DataSource, checkpoint: Checkpoint | None, start: int, run_folder: Path
) -> tuple[JournaledSource, list[str]]:
    """The source with the run's journal around it; close that when the run ends.

    Args:
        checkpoint: that the run goes on from; None: its data begin anew.
        start: the first rollout.
    Returns: the source, and what there is to say.
    Raises: OSError naming the journal if it cannot be written.
    """
    path = journal_path(config, run_folder)
    messages = _prepare(config, path, checkpoint)
    version = version_after(start - 1 if checkpoint is None else checkpoint.rollout_id)
    keeps = config.checkpoint.save is not None
    try:
        journal = Journal(path, keeps_payloads=keeps, version=version)
    except DataError as error:
        aside = set_aside(path, "damaged")
        messages.append(f"{error}; it is called {aside.name} now, and what it had kept is generated anew")
        journal = Journal(path, keeps_payloads=keeps, version=version)
    is_new = "settings" not in journal.meta()
    why_not = None if is_new else _why_not(journal, config)
    if config.rollout.deterministic:
        why_not = "--deterministic makes whole batches"
    settings = _settings(config)
    begins: dict[str, Any] = {"settings": settings, "run_folder": str(run_folder)}
    if is_new:
        begins["first_group_id"] = 0 if checkpoint is None else _next_group_id(checkpoint)
    journal.set_meta(**begins, epoch_size=source.epoch_size(), mixed=bool(config.data.prompt_data_weights))
    where = "the first prompt" if checkpoint is None else checkpoint.path.name
    journal.note(None, "start", f"from {where}, as process {os.getpid()} on {socket.gethostname()}")
    uses_finished = config.rollout.rollout_function_path in _USES_FINISHED
    journaled = JournaledSource(source, journal, version=version, uses_finished=uses_finished, why_not=why_not)
    if checkpoint is None and not is_new:
        journaled.begin_anew()
    return journaled, messages


def _prepare(config: Config, path: Path, checkpoint: Checkpoint | None) -> list[str]:
    """Bring the journal that the run goes on with to its place, and others out of it. Returns: what there is to say."""
    if checkpoint is None:
        if path.exists() and not config.checkpoint.goes_on:
            set_aside(path, "earlier")
        return []
    wanted = (checkpoint.data_source.get(KEY) or {}).get("id")
    there = checkpoint.path.parent / FILE
    try:
        found = _id_of(there)
    except DataError as error:
        if path.exists():
            set_aside(path, "damaged" if there == path else "earlier")
        return [f"{error}; groups that were under way are generated anew"]
    if found is None or found != wanted:
        if path.exists():
            set_aside(path, "earlier")
        if wanted is None:
            return []  # of a vime that kept none
        return [f"{there} is not the journal of {checkpoint.path.name}; groups that were under way are generated anew"]
    if there != path:
        if path.exists():
            set_aside(path, "earlier")
        copy_journal(there, path)
    return []


def _id_of(path: Path) -> str | None:
    """Which journal a file is; None where there is none. Raises: DataError if it is damaged."""
    if not path.is_file():
        return None
    journal = Journal.read(path)
    try:
        journal.check_file()
        return journal.id
    finally:
        journal.close()


def _next_group_id(checkpoint: Checkpoint) -> int:
    value = checkpoint.data_source.get("next_group_id", 0)
    return value if isinstance(value, int) else 0


def _settings(config: Config) -> dict[str, Any]:
    """What a finished group depends on."""
    data = asdict(config.rollout) | asdict(config.reward) | asdict(config.teacher)
    data |= {f"vllm_{name}": value for name, value in config.vllm.items()}
    data |= {"hf_checkpoint": config.checkpoint.hf_checkpoint, "rollout_seed": config.data.rollout_seed}
    plain: dict[str, Any] = plain_settings({name: value for name, value in data.items() if name not in _FREE})
    return plain


def _why_not(journal: Journal, config: Config) -> str | None:
    """The settings that changed since the groups were made, as a reason to make them anew."""
    try:
        before, now = dict(json.loads(journal.meta()["settings"])), json.loads(json.dumps(_settings(config)))
    except (TypeError, ValueError):
        return "the journal does not say under which settings they were made"
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return f"changed since: {', '.join('--' + name.replace('_', '-') for name in changed)}" if changed else None
