"""Synchronous training: generate, train, publish the weights, again.

    python train.py --hf-checkpoint … --prompt-data … --rollout-batch-size … [--config recipe.yaml] [flags]

`python train.py --help` lists the flags; `vime config` with the same flags prints what they resolve to.
"""

from __future__ import annotations

import sys

from vime.cli.program import start

if __name__ == "__main__":
    sys.exit(start("train.py"))
