"""How a stub engine behaves: read from one environment variable, because its command line is vLLM's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

MODULE = "tests.stub_engine"
"""What `vime.engine.vllm.processes.SERVER_VARIABLE` names to start stubs in vLLM's place."""
VARIABLE = "VIME_STUB_ENGINE"


@dataclass(frozen=True, slots=True, kw_only=True)
class StubSettings:
    """Speed and answers of a stub."""

    brain: str = "model"
    """model: sample from the weights it has (a dense Qwen3, float32); dice: random tokens, no arithmetic, no torch."""
    first_token_s: float = 0.0
    """From a request's arrival to its first step."""
    token_s: float = 0.0
    """Between two tokens of a sample."""
    tokens_per_step: int = 1
    """Tokens of a sample that appear at once; with dice, fewer steps are cheaper."""
    load_s: float = 0.0
    """From the process's start to its first answer, as if it loaded something."""

    def to_environment(self) -> dict[str, str]:
        """The variable that tells a stub all this."""
        return {VARIABLE: json.dumps(asdict(self))}


def read_settings(environment: Mapping[str, str] = os.environ) -> StubSettings:
    """What the environment says; the defaults where it says nothing."""
    return StubSettings(**json.loads(environment.get(VARIABLE, "{}")))
