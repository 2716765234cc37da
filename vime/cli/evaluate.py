"""`vime eval`: the held-out sets of a checkpoint, with engines and router alone."""

from __future__ import annotations

from collections.abc import Sequence

_HELP = """\
usage: vime eval --hf-checkpoint FOLDER --rm-type NAME --eval-prompt-data NAME PATH [settings]

Evaluates an HF checkpoint: starts engines and the router, samples each prompt of the held-out sets, scores the answers,
prints a table, and leaves metrics.jsonl and the samples (evaluations/*.parquet) in the run folder. It is train.py with
--num-rollout 0, so that it takes the settings of training, also as --config FILE; those of training alone are not read.
With --load FOLDER the newest training checkpoint there is evaluated: a trainer reads it and hands its weights over.

Settings: `vime config --help`. Several sets with settings of their own: docs/evaluation.md.
"""


def run(argv: Sequence[str]) -> int:
    """`vime eval [settings]`. Returns: the exit code of `vime.cli.launch.main`."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(_HELP, end="")
        return 0 if argv else 2
    from vime.cli.launch import main

    return main([*argv, "--num-rollout", "0"])
