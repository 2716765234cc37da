"""Rewards: one file per grader, and `REWARDS`, the names that --rm-type, --rm-parts and metadata.rm_type may say.

A grader is a plain function of (response, label, metadata). To add one, copy the shortest file here and add its line.
"""

from __future__ import annotations

from vime.rewards import dapo, deepscaler, exact_match, f1, gsm8k, math, multiple_choice, random
from vime.rewards.extract import boxed
from vime.rewards.grade import VERDICTS, BuiltIn, Grade, GradeFunction, Verdict

_boxed_exact_match, _boxed_f1 = boxed(exact_match.grade), boxed(f1.grade)
_boxed_choice = boxed(multiple_choice.grade)

REWARDS: dict[str, BuiltIn] = {
    "boxed_exact_match": BuiltIn(_boxed_exact_match, _boxed_exact_match),
    "boxed_f1": BuiltIn(_boxed_f1, _boxed_f1),
    "boxed_gpqa": BuiltIn(_boxed_choice, _boxed_choice),
    "boxed_multiple_choice": BuiltIn(_boxed_choice, _boxed_choice),
    "dapo": BuiltIn(dapo.grade, dapo.quick_grade, failure=dapo.failure, entries=("score", "acc")),
    "deepscaler": BuiltIn(deepscaler.grade, deepscaler.quick_grade),
    "exact_match": BuiltIn(exact_match.grade, exact_match.grade),
    "f1": BuiltIn(f1.grade, f1.grade),
    "gpqa": BuiltIn(multiple_choice.grade, multiple_choice.grade),
    "gsm8k": BuiltIn(gsm8k.grade, gsm8k.grade),
    "math": BuiltIn(math.grade, math.quick_grade),
    "multiple_choice": BuiltIn(multiple_choice.grade, multiple_choice.grade),
    "random": BuiltIn(random.grade, random.grade, needs_label=False),
}

REMOTE = frozenset({"remote_rm", "boxed_remote_rm"})
"""Scored by the server at --rm-url (vime/rewards/remote.py), not by a grader here."""
REWARD_NAMES = tuple(sorted([*REWARDS, *REMOTE]))
"""What --rm-type, --rm-parts and metadata.rm_type may say."""

__all__ = ["REMOTE", "REWARDS", "REWARD_NAMES", "VERDICTS", "BuiltIn", "Grade", "GradeFunction", "Verdict"]
