"""vLLM's server with something wrong, for broken.py; a run starts it where `SERVER_VARIABLE` names this module."""

from __future__ import annotations

import os
import sys
from typing import Any

BREAK_VARIABLE = "AGREEMENT_BREAK"
"""What is wrong: raw, late or cache."""


def main() -> None:
    """Serve until ended."""
    from vime.engine.vllm import launch

    what = os.environ[BREAK_VARIABLE]
    if what == "raw":  # log-probs before the temperature is applied
        sys.argv[sys.argv.index("--logprobs-mode") + 1] = "raw_logprobs"
    elif what == "late":  # weights are those of the sync before
        sys.argv[sys.argv.index("--worker-extension-cls") + 1] = "benchmarks.agreement.late_worker.WorkerExtension"
    elif what == "cache":  # keys and values of older weights are used
        _keep_prefix_cache()
    else:
        raise SystemExit(f"{BREAK_VARIABLE} is {what!r}; give raw, late or cache")
    launch.main()


def _keep_prefix_cache() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    pause_and_clear = AsyncLLM.pause_generation

    async def pause(self: Any, **settings: Any) -> None:
        await pause_and_clear(self, **settings | {"clear_cache": False})

    async def say_so(*_: object, **__: object) -> bool:
        return True

    AsyncLLM.pause_generation, AsyncLLM.reset_prefix_cache = pause, say_so  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
