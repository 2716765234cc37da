"""An analysis as a picture: by place, by probability, by layer, and each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vime.agreement.analysis import Analysis
from vime.agreement.breakdown import Bin
from vime.agreement.comparison import ENGINE


def draw(analysis: Analysis, path: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    _bins(axes[0, 0], analysis.positions, "place in the response")
    _bins(axes[0, 1], analysis.probabilities, "probability of the token, by the engine")
    for name, values in analysis.layers.items():
        axes[1, 0].plot(range(len(values)), np.maximum(values, 1e-18), marker="o", ms=3, label=name)
    axes[1, 0].set(yscale="log", xlabel="0: embedding, then layers", ylabel="hidden states, relative difference")
    if analysis.layers:
        axes[1, 0].legend(fontsize=7)
    _tokens(axes[1, 1], analysis)
    verdicts = "; ".join(f"{who}: {verdict.word}" for who, verdict in analysis.verdicts.items())
    figure.suptitle(f"step {analysis.comparison.step}, {analysis.comparison.origin}: {verdicts}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bins(axes: Any, by_name: Mapping[str, Sequence[Bin]], label: str) -> None:
    for name, bins in by_name.items():
        axes.plot(range(len(bins)), [b.mean for b in bins], marker="o", ms=3, label=name)
    some = next(iter(by_name.values()))
    axes.set_xticks(range(len(some)), [f"{b.low:g}" for b in some], fontsize=7)
    axes.set(yscale="log", xlabel=f"{label}, from", ylabel="mean absolute difference, nats")
    axes.legend(fontsize=7)


def _tokens(axes: Any, analysis: Analysis) -> None:
    """The engine's log-prob of each token against the most exact one."""
    scores = analysis.comparison.scores
    exact = list(scores)[-1]
    axes.plot(scores[exact], scores[ENGINE], ".", ms=2)
    low = min(float(scores[exact].min()), float(scores[ENGINE].min()))
    axes.plot([low, 0], [low, 0], lw=0.5, color="grey")
    axes.set(xlabel=f"log-prob by {exact}", ylabel=f"log-prob by the {ENGINE}")
