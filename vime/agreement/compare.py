"""Scores each rollout of a run by HF under the weights that sampled it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vime.agreement.comparison import ENGINE, Comparison, RunFigures
from vime.agreement.hf_model import HfModel
from vime.agreement.run_files import Pair, RunFiles, SavedWeights, pairs_of
from vime.agreement.tokens import select
from vime.config import Config
from vime.config.dtype import run_dtype
from vime.config.hf import read_model_config
from vime.errors import ConfigError
from vime.loop.staleness import version_after
from vime.observability.rollout_file import read_rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What to compare, and how."""

    steps: Sequence[int] | None = None
    """Rollouts; None: the first of each saved version."""
    max_samples: int | None = None
    """Of each rollout; None: all."""
    device: str = "cpu"
    max_tokens: int = 8192
    """In one forward pass."""


def planned(run: RunFiles, hf_checkpoint: Path | None, steps: Sequence[int] | None) -> tuple[list[Pair], list[str]]:
    """What of a run will be compared, and sentences on what cannot be.

    Args: hf_checkpoint: what training started from; None if it is not here.
    Raises: ConfigError as `pairs_of`, or if the run sampled from a part of the vocabulary.
    """
    rollout = run.config.rollout
    if rollout.rollout_top_p != 1.0 or rollout.rollout_top_k != -1:
        raise ConfigError(
            f"the run sampled with --rollout-top-p {rollout.rollout_top_p} and --rollout-top-k "
            f"{rollout.rollout_top_k}; log-probs over a part of the vocabulary are not compared"
        )
    pairs, notes = pairs_of(run.rollouts(), run.weights(hf_checkpoint), steps)
    if hf_checkpoint is None and any(not pair.weights.is_hf for pair in pairs):
        raise ConfigError("training checkpoints are read with the HF checkpoint they began from; add --hf-checkpoint")
    return pairs, notes


def compare(run: RunFiles, pair: Pair, hf_checkpoint: Path | None, wishes: Wishes) -> Comparison:
    """Score one rollout. Raises: DataError if its file cannot be read."""
    samples = [sample for group in read_rollout(pair.rollout) for sample in group.samples]
    tokens = select(samples, pair.weights.version, max_samples=wishes.max_samples)
    temperature = run.config.rollout.rollout_temperature
    scores = {ENGINE: tokens.engine}
    with hf_folder(pair.weights, hf_checkpoint) as folder:
        dtype = dtype_of(run.config, folder)
        model = HfModel(folder, dtype=dtype, device=wishes.device, max_tokens=wishes.max_tokens)
    for precision in dict.fromkeys((dtype, "float32")):
        if precision != dtype:
            model.to_float32()
        scores[f"HF {precision}"] = tokens.pick(model.log_probs(tokens.sequences, temperature=temperature))
    return Comparison(
        step=pair.step,
        version=pair.weights.version,
        origin=pair.weights.origin,
        tokens=tokens,
        temperature=temperature,
        scores=scores,
        run=RunFigures.of(run.step_metrics().get(pair.step)),
        notes=_notes(pair, len(tokens.samples), len(samples)),
    )


def dtype_of(config: Config, folder: Path) -> str:
    """What the run trained and served in."""
    return run_dtype(config.megatron, read_model_config(str(folder)))


def _notes(pair: Pair, num_compared: int, num_samples: int) -> list[str]:
    notes = []
    trainer = version_after(pair.step - 1)
    if trainer != pair.weights.version:
        notes.append(
            f"the trainer had version {trainer} when it trained on this rollout, so the run's own figure compares two "
            "versions of the policy"
        )
    if num_compared < num_samples:
        notes.append(f"{num_compared} of the rollout's {num_samples} samples; the run's own figure is over all")
    return notes


@contextmanager
def hf_folder(weights: SavedWeights, hf_checkpoint: Path | None) -> Iterator[Path]:
    """The weights as an HF checkpoint while the block lasts."""
    if weights.is_hf:
        yield weights.path
        return
    assert hf_checkpoint is not None, "checked"
    from vime.loop.checkpoint import weights_of
    from vime.trainer.megatron.known_warnings import silence

    silence()
    from vime.trainer.megatron.convert import to_hf

    with tempfile.TemporaryDirectory(prefix="vime_mismatch_") as scratch:
        trainer, _ = weights_of(weights.path, None)
        to_hf(trainer, hf_checkpoint, Path(scratch) / "hf")
        yield Path(scratch) / "hf"
