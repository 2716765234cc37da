"""Which saved weights of a run sampled which of its rollouts.

The engines' policy version after the weights trained on rollout r were published is `version_after(r)`, and every
sampled token is stamped with the version that sampled it. So weights saved after rollout r belong to the tokens of that
version, most of them in rollout r + 1, and to no others: nothing is compared by guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.saved import read_saved
from vime.errors import ConfigError, DataError
from vime.loop.checkpoint import find_checkpoints, rollout_of
from vime.loop.staleness import version_after
from vime.observability.run_folder import read_metrics
from vime.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights of one policy version on the disk."""

    version: PolicyVersion
    path: Path
    origin: str
    """In words."""
    is_hf: bool = True
    """An HF checkpoint; else a training checkpoint, to be converted."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A rollout, and the weights that sampled tokens of it."""

    step: int
    """The rollout's number, as in metrics.jsonl."""
    rollout: Path
    weights: SavedWeights


class RunFiles:
    """What a run's folder holds to compare.

    Args: path: the folder of --run-dir; it may have been moved, its files are then looked for at the new place.
    Raises: ConfigError if it is no run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Config = read_saved(path)

    def rollouts(self) -> dict[int, Path]:
        """Number -> file, of the rollouts that were kept."""
        files = sorted((self.path / "rollouts").glob("rollout_*.parquet"))
        return {int(file.stem.removeprefix("rollout_")): file for file in files}

    def weights(self, hf_checkpoint: Path | None) -> dict[PolicyVersion, SavedWeights]:
        """Every version whose weights are on the disk.

        Args: hf_checkpoint: what the run started from, if it is here.
        """
        found: dict[PolicyVersion, SavedWeights] = {}
        settings = self.config.checkpoint
        if settings.save is not None:
            for path in find_checkpoints(self._moved(settings.save)):
                after = rollout_of(path)
                saved = SavedWeights(version_after(after), path, f"checkpoint after rollout {after}", is_hf=False)
                found[saved.version] = saved
        if settings.save_hf is not None and settings.save_hf != settings.save_hf.format(rollout_id=0):
            for after in range(max(self.rollouts(), default=-1) + 1):
                path = self._moved(settings.save_hf.format(rollout_id=after))
                if (path / "config.json").is_file():
                    found[version_after(after)] = SavedWeights(
                        version_after(after), path, f"HF export after rollout {after}"
                    )
        if hf_checkpoint is not None and not (settings.load is not None and settings.finetune):
            first = version_after((self.config.rollout.start_rollout_id or 0) - 1)
            if settings.load is not None:  # the run that is gone on with began with it
                first = version_after(-1)
            found[first] = SavedWeights(first, hf_checkpoint, "the checkpoint that training started from")
        return found

    def step_metrics(self) -> Mapping[int, Mapping[str, Any]]:
        """As `read_metrics`; empty if there is no metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else {}

    def _moved(self, path: str) -> Path:
        """A path of the run's, where it is now: what lay in the run's folder is looked for in `self.path`."""
        there, before = Path(path), Path(self.config.log.run_dir)
        if not there.exists() and there.is_relative_to(before):
            return self.path / there.relative_to(before)
        return there


def rollout_versions(path: Path) -> set[PolicyVersion]:
    """The policy versions that sampled tokens of a rollout's file. Raises: DataError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        column = pq.read_table(path, columns=["weight_versions"]).column(0)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a rollout: {type(error).__name__}: {error}") from error
    return {span["version"] for spans in column.to_pylist() for span in spans or ()}


def pairs_of(
    rollouts: Mapping[int, Path], weights: Mapping[PolicyVersion, SavedWeights], steps: Sequence[int] | None
) -> tuple[list[Pair], list[str]]:
    """What can be compared.

    Args: steps: the wanted rollouts; None: for each saved version the first rollout with tokens of it.
    Returns: the pairs by step; sentences on saved weights that no rollout is of.
    Raises: ConfigError if a wanted step cannot be compared, or nothing can.
    """
    if not rollouts:
        raise ConfigError("no rollouts were kept there (rollouts/*.parquet); run without --no-save-rollouts")
    if not weights:
        raise ConfigError(f"no weights of that run were found; {_HOW_TO_SAVE}")
    if steps is not None:
        return _wanted_pairs(rollouts, weights, steps), []
    first: dict[PolicyVersion, int] = {}
    unread: list[str] = []
    for step in sorted(rollouts):
        try:
            versions = rollout_versions(rollouts[step])
        except DataError as error:
            unread.append(str(error))
            continue
        for version in versions:
            first.setdefault(version, step)
    pairs = [Pair(first[v], rollouts[first[v]], weights[v]) for v in sorted(weights) if v in first]
    if not pairs:
        raise ConfigError(
            f"none of the saved weights (versions {_list(weights)}) sampled any of the kept rollouts (versions "
            f"{_list(first) if first else 'unknown'}); {_HOW_TO_SAVE}"
        )
    unused = [f"{w.origin} (version {v}): it sampled no kept rollout" for v, w in weights.items() if v not in first]
    return sorted(pairs, key=lambda pair: pair.step), [*unused, *unread]


_HOW_TO_SAVE = "export weights during training, such as by --save-hf 'runs/a/hf/{rollout_id}' --save-hf-interval 20"


def _wanted_pairs(
    rollouts: Mapping[int, Path], weights: Mapping[PolicyVersion, SavedWeights], steps: Sequence[int]
) -> list[Pair]:
    problems, pairs = [], []
    for step in dict.fromkeys(steps):
        if step not in rollouts:
            problems.append(f"--step {step}: rollout {step} was not kept; there are {_list(rollouts)}")
            continue
        versions = rollout_versions(rollouts[step])
        if not versions:
            problems.append(f"--step {step}: nothing says which version sampled rollout {step}; it cannot be compared")
        elif not (matching := sorted(versions & set(weights))):
            problems.append(
                f"--step {step}: version {_list(versions)} sampled rollout {step}, and weights are saved of "
                f"{_list(weights)}; version v samples rollout v - 1 where each step publishes; {_HOW_TO_SAVE}"
            )
        else:
            pairs += [Pair(step, rollouts[step], weights[version]) for version in matching]
    if problems:
        raise ConfigError(problems)
    return pairs


def _list(numbers: Iterable[int]) -> str:
    """Numbers for a sentence, those between left out where they are many."""
    ordered = sorted(numbers)
    shown = [*map(str, ordered)] if len(ordered) <= 12 else [*map(str, ordered[:6]), "…", *map(str, ordered[-3:])]
    return ", ".join(shown)
