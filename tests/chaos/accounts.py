"""What must be true of a run that was killed and resumed: every prompt accounted for, one loss curve.

Two accounts that do not know of each other: the samples in the run folder's rollout files, and the journal.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.plan import Plan, Stream
from tests.chaos.round import read_metrics
from tests.chaos.task import BATCH, SAMPLES, prompts
from vime.data.accounting import account_of
from vime.data.journal import Journal
from vime.data.journal_schema import FILE
from vime.data.versions import trainable_versions
from vime.observability.rollout_file import read_rollout
from vime.types import Group

# Engine and trainer in float32 on fresh samples; more would mean that a resume or restart brought other weights.
_MAX_LOGPROB_DIFF = 1e-4
_SAME_LOSS = 1e-5
_VERDICTS = ("rollout/reward_crashed", "rollout/reward_timeout")


@dataclass
class Accounts:
    """What was found wrong."""

    lost: list[str] = field(default_factory=list)
    """Prompts that were handed out or passed over, and that nobody trained on, dropped or still holds."""
    doubled: list[str] = field(default_factory=list)
    """Prompts trained on twice in one epoch."""
    faults: list[str] = field(default_factory=list)
    """Of the curve and the files."""


def check(plan: Plan, folder: Path, run_dir: Path, reference: list[dict[str, Any]] | None = None) -> Accounts:
    """The accounts of a finished run.

    Args:
        folder: of the task.
        reference: the last record of each step of the same run, never killed, where it must have the same curve.
    """
    accounts = Accounts()
    _check_journal(run_dir, accounts)
    _check_rollouts(plan, folder, run_dir, accounts)
    _check_curve(plan, run_dir, reference, accounts)
    return accounts


def last_records(run_dir: Path) -> list[dict[str, Any]]:
    """Of each step its last record: a step that was not saved is taken again by the resume."""
    found = {record["step"]: record for record in read_metrics(run_dir / "metrics.jsonl") if record["step"] >= 0}
    return [found[step] for step in sorted(found)]


def _check_rollouts(plan: Plan, folder: Path, run_dir: Path, accounts: Accounts) -> None:
    trained: Counter[str] = Counter()
    for rollout_id in range(plan.num_rollouts):
        path = run_dir / "rollouts" / f"rollout_{rollout_id:06d}.parquet"
        if not path.exists():
            accounts.faults.append(f"{path.name} is missing")
            continue
        groups = read_rollout(path)
        if len(groups) != BATCH or any(len(group.samples) != SAMPLES for group in groups):
            accounts.faults.append(f"{path.name} holds groups of {[len(g.samples) for g in groups]} samples")
        trained.update(str(group.samples[0].prompt) for group in groups)
        if plan.stream is not None:
            accounts.faults += _ages(plan.stream, rollout_id, groups)
    in_order = prompts(folder)
    accounts.doubled += [f"{prompt} was trained on {count} times" for prompt, count in trained.items() if count > 1]
    if plan.begins_no_more_than_needed:
        expected = in_order[: plan.num_rollouts * BATCH]
        ended = _dropped(run_dir)
        accounts.lost += [
            f"{prompt} was passed over" for i, prompt in enumerate(expected) if prompt not in trained and i not in ended
        ]


def _ages(stream: Stream, rollout_id: int, groups: list[Group]) -> list[str]:
    """What is wrong with the policy versions of a rollout's trainable tokens."""
    versions = {version for group in groups for sample in group.samples for version in trainable_versions(sample)}
    trainer = rollout_id + 1  # version 1 are the weights that a run begins with, and each rollout makes a new one
    oldest = trainer - stream.max_staleness if stream.stale_groups != "correct" else 1
    wrong = sorted(version for version in versions if not oldest <= version <= trainer)
    return [f"rollout {rollout_id} has tokens of versions {wrong}, not {oldest} to {trainer}"] if wrong else []


def _dropped(run_dir: Path) -> set[int]:
    """Rows of the file that were dropped for a reason."""
    return {life.idx for life in _lives(run_dir) if life.stage == "dropped" and life.reason and life.idx is not None}


def _check_journal(run_dir: Path, accounts: Accounts) -> None:
    trained: Counter[tuple[int, int]] = Counter()
    seen: set[tuple[int, int]] = set()
    for life in _lives(run_dir):
        who = f"group {life.group_id} (epoch {life.epoch}, row {life.idx})"
        if life.epoch is None or life.idx is None:
            accounts.faults.append(f"the journal does not know the prompt of {who}")
            continue
        if life.stage != "undone":
            seen.add((life.epoch, life.idx))
        trained[life.epoch, life.idx] += life.stage == "trained"
        if life.stage == "lost":
            accounts.lost.append(f"{who} is lost, says the journal")
        if life.stage == "dropped" and not life.reason:
            accounts.lost.append(f"{who} was dropped without a reason")
    accounts.doubled += [f"{place} was trained on {n} times, says the journal" for place, n in trained.items() if n > 1]
    # Rows come in file order, so nothing between the first and the last may be missing.
    last = max(seen, default=(0, -1))
    accounts.lost += [
        f"row {row} was passed over, says the journal" for row in range(last[1] + 1) if (last[0], row) not in seen
    ]

    said = account_of(run_dir / "checkpoints" / FILE)
    if said.is_exact != (not accounts.lost and not accounts.doubled):
        accounts.faults.append(f"`vime buffer --check` says {said.lost + said.doubled or 'all is well'}")


def _lives(run_dir: Path) -> list[Any]:
    journal = Journal.read(run_dir / "checkpoints" / FILE)
    try:
        return list(journal.lives())
    finally:
        journal.close()


def _check_curve(plan: Plan, run_dir: Path, reference: list[dict[str, Any]] | None, accounts: Accounts) -> None:
    records = last_records(run_dir)
    if [record["step"] for record in records] != list(range(plan.num_rollouts)):
        accounts.faults.append(f"metrics.jsonl has the steps {[record['step'] for record in records]}")
    for record in records:
        step = record["step"]
        if not math.isfinite(record["train/loss"]) or not math.isfinite(record["train/grad_norm"]):
            accounts.faults.append(f"step {step} has loss {record['train/loss']}, norm {record['train/grad_norm']}")
        diff = record["train/train_rollout_logprob_abs_diff"]
        if record.get("staleness/max") == 0 and not diff < _MAX_LOGPROB_DIFF:
            accounts.faults.append(f"step {step}: engine and trainer are {diff:.2g} nats apart on fresh samples")
    for ours, theirs in zip(records, reference or (), strict=False):
        if any(ours.get(name, 0) for name in _VERDICTS):
            break  # a grader died with a response in its hands: that reward is its verdict's, and all after it differ
        for name in ("train/loss", "train/grad_norm", "rollout/raw_reward"):
            if abs(ours[name] - theirs[name]) > _SAME_LOSS * max(1.0, abs(theirs[name])):
                accounts.faults.append(
                    f"step {ours['step']}: {name} is {ours[name]!r}, in the run that was never killed {theirs[name]!r}"
                )
                return
