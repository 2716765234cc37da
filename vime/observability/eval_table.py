"""An evaluation's metrics as a table to read."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The name of a set is the user's and may hold dashes, but no slash; what follows it is one of these.
_DETAIL = re.compile(
    r"eval/(?P<set>[^/]+)-(?P<what>stderr|truncated_ratio|failed_ratio|reward_\w+|response_len/\w+|pass@\d+|num_\w+)"
)

_COLUMNS = ("set", "prompts", "dropped", "samples", "reward", "stderr", "pass@", "length", "truncated", "failed")


def set_of(name: str) -> str | None:
    """The held-out set whose mean reward has this name; None for its details and for other metrics."""
    is_score = name.startswith("eval/") and "/" not in name[5:] and not _DETAIL.fullmatch(name)
    return name.removeprefix("eval/") if is_score else None


def eval_table(metrics: Mapping[str, float]) -> str:
    """One line for each held-out set: mean reward and its standard error, pass@k, lengths, what failed.

    set      prompts  samples  reward  stderr  pass@1  pass@2  length  truncated  failed  unparseable
    heldout       64      128   0.512   0.043   0.512   0.640    23.4       0.0%    0.0%         1.6%
    """
    sets = [name for name in map(set_of, metrics) if name is not None]
    rows = [_row(name, metrics) for name in sets]
    head = sorted(dict.fromkeys(column for row in rows for column in row), key=_place)
    lines = [head, *([row.get(column, "") for column in head] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _place(column: str) -> tuple[int, int]:
    """Where a column stands; those of verdicts come last, in the order they were found."""
    if column.startswith("pass@"):
        return _COLUMNS.index("pass@"), int(column.removeprefix("pass@"))
    return (_COLUMNS.index(column) if column in _COLUMNS else len(_COLUMNS)), 0


def _row(name: str, metrics: Mapping[str, float]) -> dict[str, str]:
    def value(what: str) -> float | None:
        return metrics.get(f"eval/{name}-{what}")

    row = {"set": name}
    for column, what in (("prompts", "num_prompts"), ("dropped", "num_dropped_prompts"), ("samples", "num_samples")):
        if (count := value(what)) or (count is not None and column != "dropped"):
            row[column] = f"{count:.0f}"
    row["reward"] = f"{metrics[f'eval/{name}']:.3f}"
    for what in ("stderr", *(what for what in _details(name, metrics) if what.startswith("pass@"))):
        if (number := value(what)) is not None:
            row[what] = f"{number:.3f}"
    if (length := value("response_len/mean")) is not None:
        row["length"] = f"{length:.1f}"
    verdicts = [what for what in _details(name, metrics) if what.startswith("reward_")]
    for what in ("truncated_ratio", "failed_ratio", *verdicts):
        share = value(what)
        if share or (share is not None and not what.startswith("reward_")):
            row[what.removesuffix("_ratio").removeprefix("reward_")] = f"{share:.1%}"
    return row


def _details(name: str, metrics: Mapping[str, float]) -> list[str]:
    return [m["what"] for m in map(_DETAIL.fullmatch, metrics) if m is not None and m["set"] == name]
