"""Every exception that vime raises on purpose.

VimeError
├── ConfigError (also ValueError)   a setting is wrong; lists all problems found
├── DataError (also ValueError)     a prompt file or sample is malformed
├── HookError                       a user's function raised, hung or gave something unusable
│   └── HookTimeout                 it took longer than its time limit
├── RewardError                     graders cannot run at all
│   └── SampleRewardError           a reward function gave one sample no usable number
├── EngineError                     an inference engine answered with an error or not at all
│   └── EngineDead                  its process is gone
├── WeightSyncError                 a weight set did not arrive as it was sent
└── TrainingError                   the trainer cannot go on (a NaN loss, a rank that died)
"""

from __future__ import annotations

from collections.abc import Sequence


class VimeError(Exception):
    """Base of all errors of vime."""


class ConfigError(VimeError, ValueError):
    """One or more settings are wrong. `problems` holds one sentence each: what, the value, what to do."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return ConfigError, (self.problems,)


class DataError(VimeError, ValueError):
    """A prompt file or a sample is malformed; the message names the file and line, or the sample."""


class HookError(VimeError):
    """A user's function raised or gave something unusable; the message names its flag, path, file and line."""


class HookTimeout(HookError):
    """A user's function took longer than its time limit; the message names the line it was waiting in."""


class RewardError(VimeError):
    """Graders cannot run, or a reward function gave no usable number; the message names which."""


class SampleRewardError(RewardError):
    """A reward function raised, hung or gave no usable number for one sample: no other is concerned."""


class EngineError(VimeError):
    """An inference engine answered with an error, or not at all."""


class EngineDead(EngineError):
    """The engine's server process is gone; the message carries the end of its log."""


class WeightSyncError(VimeError):
    """A weight set did not arrive as it was sent; the message names the tensors."""


class TrainingError(VimeError):
    """The trainer cannot go on; the message names rank, step and policy version."""
