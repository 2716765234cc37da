"""Synchronous training: generate, train, publish the weights, again.

    python train.py --hf-checkpoint … --prompt-data … --rollout-batch-size … [--config recipe.yaml] [flags]

`python train.py --help` lists the flags; `vime config` with the same flags prints what they resolve to.
"""

from __future__ import annotations

import sys

sys.path.insert(0, "")  # hooks are looked for where the command is given, as by `vime config`

if __name__ == "__main__":
    try:
        from vime.cli.launch import main

        code = main(sys.argv[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vime"):
            raise
        sys.exit(
            f"train.py: {error.name} is not installed in this Python ({sys.executable}); "
            "run `make setup`, then `source .venv/bin/activate`"
        )
    sys.exit(code)
