"""Rewards: one file per grader, and `REWARDS`, the names that --rm-type and metadata.rm_type may say.

A grader is a plain function of (response, label, metadata). To add one, copy the shortest file here and add its line.
"""

from __future__ import annotations

from vime.rewards import exact_match, gsm8k, math
from vime.rewards.grade import VERDICTS, Grade, GradeFunction, QuickFunction, Verdict

REWARDS: dict[str, GradeFunction] = {
    "exact_match": exact_match.grade,
    "gsm8k": gsm8k.grade,
    "math": math.grade,
}

QUICK: dict[str, QuickFunction] = {
    "exact_match": exact_match.grade,
    "gsm8k": gsm8k.grade,
    "math": math.quick_grade,
}
"""What needs no worker process: string work whose time is linear in the response. None sends the rest to a worker."""

__all__ = ["QUICK", "REWARDS", "VERDICTS", "Grade", "GradeFunction", "QuickFunction", "Verdict"]
