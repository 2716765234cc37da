"""`vime buffer`: what became of every prompt of a run, from its journal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vime.config.yaml_file import read_yaml
from vime.data.accounting import Account, account, prompt_of
from vime.data.journal import Journal
from vime.data.journal_life import Life
from vime.data.journal_schema import FILE
from vime.errors import ConfigError, DataError

_MEANING = {
    "taken": "being generated or scored",
    "finished": "wait to be trained on",
    "put_back": "wait to be handed out again",
    "trained": "trained on",
    "dropped": "nobody will train on them",
    "undone": "taken after the checkpoint that was resumed from; their prompts come again",
    "lost": "nobody has them",
}


def run(argv: Sequence[str]) -> int:
    """`vime buffer RUN [--check] [--group ID] [--prompt INDEX]`.

    Returns: 0; with --check 1 if a prompt is lost or doubled. Raises: ConfigError if there is no journal.
    """
    parser = argparse.ArgumentParser(
        prog="vime buffer",
        description="Say what became of every prompt of a run; the run may be going on, or have ended in any way.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, its folder of checkpoints, or a journal")
    parser.add_argument("--check", action="store_true", help="account for every prompt; exit with 1 if one is amiss")
    parser.add_argument("--group", type=_number, metavar="ID", help="the life of one group")
    parser.add_argument(
        "--prompt", type=_number, metavar="INDEX", help="the lives of one prompt, by its place in the data"
    )
    wanted = parser.parse_args(argv)
    path = find_journal(Path(wanted.run))
    try:
        journal = Journal.read(path)
        try:
            if wanted.check:
                journal.check_file()
            if wanted.group is not None or wanted.prompt is not None:
                return _print_lives(journal, wanted.group, wanted.prompt)
            return _print_account(journal, path, checks=wanted.check)
        finally:
            journal.close()
    except DataError as error:
        raise ConfigError(str(error)) from error


def _number(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is no number of a group or prompt; they begin with 0")
    return number


def find_journal(place: Path) -> Path:
    """The journal of a run. Args: place: its folder, that of its checkpoints, or the file. Raises: ConfigError."""
    if place.is_file():
        return place
    tried = [place / FILE]
    settings = place / "config.yaml"
    if settings.is_file():
        said: Any = read_yaml(str(settings), "the run's")
        save, run_dir = _entry(said, "checkpoint", "save"), _entry(said, "log", "run_dir")
        if save is not None:
            tried.insert(0, Path(save) / FILE)
            if run_dir is not None and Path(save).is_relative_to(run_dir):  # a copy of the folder has its own
                tried.insert(0, place / Path(save).relative_to(run_dir) / FILE)
    for path in tried:
        if path.is_file():
            return path
    raise ConfigError(f"{place}: no journal there (looked for {' and '.join(map(str, tried))})")


def _entry(said: Any, *names: str) -> str | None:
    """A text among the settings that a run has kept."""
    for name in ("settings", *names):
        said = said.get(name) if isinstance(said, dict) else None
    return said if isinstance(said, str) else None


def _print_account(journal: Journal, path: Path, *, checks: bool) -> int:
    found, now = account(journal), time.time()
    print(f"{path}: {sum(found.stages.values())} groups")
    for stage, count in found.stages.items():
        if count:
            print(f"  {stage:<9} {count:>8}   {_MEANING[stage]}")
    for reason, count in found.reasons.items():
        print(f"  dropped   {count:>8}   {reason}")
    if (oldest := found.oldest) is not None:
        print(
            f"oldest in flight: group {oldest.group_id} ({prompt_of(oldest)}), {oldest.stage}, taken for rollout "
            f"{oldest.rollout_id} {now - oldest.taken_s:.0f} s ago"
        )
    saves = journal.query("SELECT rollout_id, version FROM saves ORDER BY rollout_id DESC LIMIT 1")
    if saves:
        print(f"last checkpoint: rollout {saves[0][0]}, policy version {saves[0][1]}")
    if found.num_reused or found.num_again:
        print(
            f"after resumes: {found.num_reused} groups used again, {found.num_again} generated again (sampled by a "
            "version that was lost, or under other settings)"
        )
    return _print_check(found) if checks else 0


def _print_check(found: Account) -> int:
    for sentence in found.lost:
        print(f"LOST     {sentence}")
    for sentence in found.doubled:
        print(f"DOUBLED  {sentence}")
    verdict = "every prompt is accounted for" if found.is_exact else "prompts are amiss"
    print(f"check: {len(found.lost)} lost, {len(found.doubled)} doubled; {verdict}")
    return 0 if found.is_exact else 1


def _print_lives(journal: Journal, group_id: int | None, index: int | None) -> int:
    asked = [("group_id", group_id), ("idx", index)]
    where = " AND ".join(f"{name} = ?" for name, value in asked if value is not None)
    lives = list(journal.lives(where, [value for _, value in asked if value is not None]))
    if not lives:
        print("no such group has been handed out")
        return 1
    for life in lives:
        print(f"group {life.group_id} ({prompt_of(life)}): {life.stage}{f', {life.reason}' if life.reason else ''}")
        for at_s, text in sorted(_history(journal, life)):
            print(f"  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_s))}  {text}")
    return 0


def _history(journal: Journal, life: Life) -> Iterator[tuple[float, str]]:
    times = f" (time {life.num_taken})" if life.num_taken > 1 else ""
    yield life.taken_s, f"taken{times}"
    if life.num_put_back:
        yield life.taken_s, f"was put back {life.num_put_back} times so far"
    if life.generated_s is not None:
        spans = f"version {life.oldest}" if life.oldest == life.newest else f"versions {life.oldest} to {life.newest}"
        yield life.generated_s, f"generated: {life.num_samples} samples, {life.num_tokens} tokens, {spans}"
    if life.finished_s is not None:
        yield life.finished_s, "rewarded"
    if life.ended_s is not None:
        yield life.ended_s, f"{life.stage} in rollout {life.rollout_id}{f': {life.reason}' if life.reason else ''}"
    for note in journal.notes(life.group_id):
        yield note.at_s, f"{note.what}: {note.detail}"
