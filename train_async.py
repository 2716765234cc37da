"""Training one step ahead: the next rollout is generated while the one before is trained on.

    python train_async.py --hf-checkpoint … --prompt-data … --rollout-batch-size … [--config recipe.yaml] [flags]

Takes the flags of train.py (`python train_async.py --help`). Engines and trainer need devices of their own.
"""

from __future__ import annotations

import sys

from vime.cli.program import start

if __name__ == "__main__":
    sys.exit(start("train_async.py", overlapped=True))
