"""The whole of a comparison: who differs from whom on the same tokens, where, and from what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime.agreement import inside
from vime.agreement.breakdown import Bin, by_position, by_probability
from vime.agreement.causes import explain
from vime.agreement.comparison import ENGINE, FRESH, TRAINER, Comparison
from vime.agreement.engine import FreshEngine
from vime.agreement.explain import (
    Explanation,
    Verdict,
    best,
    precision_bound,
    verdict_on_engine,
    verdict_on_trainer,
)
from vime.agreement.hf_model import WIDER, HfModel
from vime.agreement.tokens import Floats, Tokens
from vime.config import Config
from vime.platform.base import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What scores are computed with."""

    config: Config
    """The run's."""
    platform: Platform
    max_tokens: int = 8192
    """In one forward pass of HF's."""
    with_trainer: bool = True
    start_engine: Callable[[Path], AbstractContextManager[FreshEngine]] | None = None
    """Starts an engine with an HF checkpoint; None: none is asked."""
    num_inside: int = 16
    """Samples whose hidden states are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Folders of HF checkpoints."""

    sampled: Path
    """What is said to have sampled the tokens."""
    others: Mapping[str, Path]
    """In words -> saved weights of other versions, near this one."""
    dtype: str
    """The run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Of one rollout."""

    comparison: Comparison
    positions: Mapping[str, Sequence[Bin]]
    probabilities: Mapping[str, Sequence[Bin]]
    layers: Mapping[str, Sequence[float]]
    """Pair -> relative difference of hidden states, of the embedding and after each layer."""
    flips: Mapping[str, Mapping[int, float]]
    """Pair -> layer -> share of tokens with other experts."""
    explanations: Sequence[Explanation]
    verdicts: Mapping[str, Verdict]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.comparison.to_json() | {
            "by position": {name: [b.to_json() for b in bins] for name, bins in self.positions.items()},
            "by probability": {name: [b.to_json() for b in bins] for name, bins in self.probabilities.items()},
            "hidden states by layer": {name: list(values) for name, values in self.layers.items()},
            "router flips by layer": {name: dict(values) for name, values in self.flips.items()},
            "causes": [x.to_json() for x in self.explanations],
            "verdicts": {who: {"word": v.word, "sentence": v.sentence} for who, v in self.verdicts.items()},
        }


def analyse(
    tokens: Tokens,
    weights: Weights,
    means: Means,
    *,
    make: Callable[[Mapping[str, Any], float], Comparison],
    fresh: Floats | None = None,
) -> Analysis:
    """Score the tokens by everybody, one after the other, and find out what the differences come from.

    Args:
        make: (scores, temperature) -> the comparison, with what is known of the rollout.
        fresh: [N] log-probs at temperature 1 over the whole vocabulary by a new engine, where it gave them already.
    Raises: EngineError, ConfigError as the engine and the trainer do.
    """
    temperature = means.config.rollout.rollout_temperature
    scores: dict[str, Any] = {ENGINE: tokens.engine}
    looked = range(min(means.num_inside, len(tokens.samples)))
    if fresh is None and means.start_engine is not None:  # before anything else lies on the device
        with means.start_engine(weights.sampled) as engine:
            fresh = tokens.pick(engine.log_probs(tokens.sequences))
    device, wide = means.platform.device_type, WIDER[weights.dtype]
    hf = _hf(weights.sampled, weights.dtype, device, means.max_tokens)
    narrow_name, wide_name = f"HF {weights.dtype}", f"HF {wide}"
    as_sampled: dict[str, Any] = {"temperature": temperature, "supports": tokens.supports}
    scores[narrow_name] = tokens.pick(hf.log_probs(tokens.sequences, **as_sampled))
    seen = {narrow_name: inside.look_inside(hf, tokens, looked)}
    hf.compute_in(wide)
    exact = tokens.pick(hf.log_probs(tokens.sequences, **as_sampled))
    seen[wide_name] = inside.look_inside(hf, tokens, looked)
    if means.with_trainer:
        routed = tokens.routed_experts if means.config.train.use_rollout_routing_replay else None
        with closing(_scorer(means, weights.sampled)) as trainer:
            scored = trainer.log_probs(tokens.sequences, **as_sampled, routed_experts=routed)
            scores[TRAINER] = tokens.pick(scored)
            seen[TRAINER] = inside.look_inside_with_experts(trainer, tokens, looked, routed)
    of_all = temperature == 1.0 and not tokens.is_narrow  # as a new engine scores
    if fresh is not None and of_all:
        scores[FRESH] = fresh
    scores[wide_name] = exact
    others = {}
    for words, folder in weights.others.items():
        others[words] = _hf(folder, weights.dtype, device, means.max_tokens)
        others[words].compute_in(wide)
    rounding = scores[narrow_name] - exact
    bound = precision_bound(float(np.abs(rounding).mean()), weights.dtype)
    causes = explain(tokens, hf, others, temperature=temperature, expected=exact, rounding=rounding, bound=bound)
    fresh_mean = None
    if fresh is not None:
        at_one = exact if of_all else tokens.pick(hf.log_probs(tokens.sequences))
        fresh_mean = float(np.nanmean(np.abs(fresh - at_one)))
    comparison = make(scores, temperature)
    return _concluded(comparison, seen, narrow_name, wide_name, bound, causes, fresh_mean)


def _concluded(
    comparison: Comparison,
    seen: Mapping[str, inside.Insides],
    narrow_name: str,
    wide_name: str,
    bound: float,
    causes: list[Explanation],
    fresh_mean: float | None,
) -> Analysis:
    tokens, scores, exact = comparison.tokens, comparison.scores, seen[wide_name]
    apart = {name: np.abs(values - scores[wide_name]) for name, values in scores.items() if name != wide_name}
    if (recorded := inside.recorded(tokens, exact)) is not None:
        seen = {**seen, ENGINE: recorded}
    rounding = inside.by_layer(seen[narrow_name], exact)
    layers = {f"{narrow_name} - {wide_name}": rounding}
    flips = {
        f"{name} - {wide_name}": by_layer
        for name, those in seen.items()
        if name != wide_name and (by_layer := inside.flips_by_layer(those, exact))
    }
    routers = seen.get(ENGINE, seen.get(TRAINER, seen[narrow_name]))
    verdicts = {
        "engine": verdict_on_engine(
            float(apart[ENGINE].mean()),
            bound,
            best(causes),
            inside.flips(routers, exact, tokens, apart[ENGINE]),
            fresh_mean,
        )
    }
    if TRAINER in seen:
        layers[f"{TRAINER} - {wide_name}"] = inside.by_layer(seen[TRAINER], exact)
        verdicts["trainer"] = verdict_on_trainer(
            float(apart[TRAINER].mean()),
            bound,
            inside.flips(seen[TRAINER], exact, tokens, apart[TRAINER]),
            inside.first_layer_apart(layers[f"{TRAINER} - {wide_name}"], rounding),
        )
    return Analysis(
        comparison=comparison,
        positions={f"{n} - {wide_name}": by_position(a, tokens.position) for n, a in apart.items()},
        probabilities={f"{n} - {wide_name}": by_probability(a, tokens.engine) for n, a in apart.items()},
        layers=layers,
        flips=flips,
        explanations=causes,
        verdicts=verdicts,
    )


def _hf(folder: Path, dtype: str, device: str, max_tokens: int) -> HfModel:
    return HfModel(folder, dtype=dtype, device=device, max_tokens=max_tokens)


def _scorer(means: Means, folder: Path) -> Any:
    from vime.trainer.megatron.patches.lean_import import lean_import

    with lean_import():
        from vime.trainer.megatron.scoring import Scorer

    return Scorer(means.config, folder, means.platform)
