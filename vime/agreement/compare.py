"""Rollouts and weights of a run, or of a checkpoint alone, brought together and analysed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vime.agreement.analysis import Analysis, Means, Weights, analyse
from vime.agreement.comparison import Comparison, RunFigures
from vime.agreement.engine import FreshEngine, engine_starter
from vime.agreement.own_rollouts import own_prompts
from vime.agreement.run_files import Pair, RunFiles, SavedWeights, pairs_of
from vime.agreement.tokens import select
from vime.config import Config
from vime.config.dtype import run_dtype
from vime.config.hf import read_model_config
from vime.errors import ConfigError
from vime.loop.staleness import version_after
from vime.observability.rollout_file import read_rollout
from vime.protocols import SamplingParams
from vime.types import PolicyVersion, Sample


def planned(
    run: RunFiles, hf_checkpoint: Path | None, steps: Sequence[int] | None
) -> tuple[list[Pair], dict[PolicyVersion, SavedWeights], list[str]]:
    """What of a run will be compared, all saved weights, and sentences on what cannot be compared.

    Args: hf_checkpoint: what training started from; None if it is not here.
    Raises: ConfigError as `pairs_of`.
    """
    weights = run.weights(hf_checkpoint)
    pairs, notes = pairs_of(run.rollouts(), weights, steps)
    if hf_checkpoint is None and any(not entry.is_hf for entry in weights.values()):
        raise ConfigError("training checkpoints are read with the HF checkpoint they began from; add --hf-checkpoint")
    return pairs, weights, notes


def analyse_step(
    run: RunFiles,
    pair: Pair,
    weights: Mapping[PolicyVersion, SavedWeights],
    hf_checkpoint: Path | None,
    means: Means,
    *,
    max_samples: int | None,
) -> Analysis:
    """One rollout of a run. Raises: DataError if its file cannot be read; as `analyse`."""
    samples = [sample for group in read_rollout(pair.rollout) for sample in group.samples]
    tokens = select(samples, pair.weights.version, max_samples=max_samples)

    def make(scores: Mapping[str, Any], temperature: float) -> Comparison:
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

    with ExitStack() as stack:
        folder = stack.enter_context(hf_folder(pair.weights, hf_checkpoint))
        others = {
            f"version {near.version} ({near.origin})": stack.enter_context(hf_folder(near, hf_checkpoint))
            for near in _neighbours(pair.weights.version, weights)
        }
        dtype = run_dtype(run.config.megatron, read_model_config(str(folder)))
        return analyse(tokens, Weights(sampled=folder, others=others, dtype=dtype), means, make=make)


def analyse_samples(
    samples: Sequence[Sample],
    folder: Path,
    means: Means,
    *,
    max_samples: int | None,
    origin: str,
    engine: FreshEngine | None = None,
) -> Analysis:
    """Samples that an HF checkpoint is said to have sampled, whatever versions they carry.

    Args: engine: one that runs with the checkpoint; it scores the samples, and is ended before anybody else does.
    """
    tokens = select(samples, None, max_samples=max_samples)
    fresh = None
    if engine is not None:
        fresh = tokens.pick(engine.log_probs(tokens.sequences)) if means.start_engine is not None else None
        engine.stop()

    def make(scores: Mapping[str, Any], temperature: float) -> Comparison:
        return Comparison(None, 0, origin, tokens, temperature, scores, None)

    dtype = run_dtype(means.config.megatron, read_model_config(str(folder)))
    return analyse(tokens, Weights(sampled=folder, others={}, dtype=dtype), means, make=make, fresh=fresh)


def analyse_checkpoint(
    folder: Path,
    means: Means,
    *,
    max_samples: int | None = None,
    samples_per_prompt: int = 4,
    max_new_tokens: int = 64,
) -> Analysis:
    """An HF checkpoint, on samples that an engine started for it makes of prompts of our own.

    Args: samples_per_prompt, max_new_tokens: what the engine samples of each of the 8 prompts.
    Raises: EngineError if the engine does not start; as `analyse`.
    """
    with engine_starter(means.config, means.platform)(folder) as engine:
        samples = sample_own(
            engine, folder, means.config, samples_per_prompt=samples_per_prompt, max_new_tokens=max_new_tokens
        )
        origin = f"{folder}, on samples of its own"
        return analyse_samples(samples, folder, means, max_samples=max_samples, origin=origin, engine=engine)


def sample_own(
    engine: FreshEngine, folder: Path, config: Config, *, samples_per_prompt: int, max_new_tokens: int
) -> list[Sample]:
    """Samples by an engine of its checkpoint `folder`, of prompts of our own, at the run's temperature."""
    rollout = config.rollout
    context = rollout.rollout_max_context_len or int(read_model_config(str(folder))["max_position_embeddings"])
    sampling = SamplingParams(
        temperature=rollout.rollout_temperature,
        n=samples_per_prompt,
        max_tokens=min(max_new_tokens, context // 2),
        seed=0,
    )
    return engine.sample(own_prompts(folder), sampling)


def _neighbours(version: PolicyVersion, weights: Mapping[PolicyVersion, SavedWeights]) -> list[SavedWeights]:
    """The saved weights before and after a version: what an engine would have that missed a sync, or got it early."""
    before = [v for v in weights if v < version]
    after = [v for v in weights if v > version]
    return [weights[v] for v in [*([max(before)] if before else []), *([min(after)] if after else [])]]


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
    from vime.trainer.megatron.patches.lean_import import lean_import

    with lean_import():
        from vime.trainer.megatron.checkpoints.convert import to_hf

    with tempfile.TemporaryDirectory(prefix="vime_mismatch_") as scratch:
        trainer, _ = weights_of(weights.path, None)
        to_hf(trainer, hf_checkpoint, Path(scratch) / "hf")
        yield Path(scratch) / "hf"
