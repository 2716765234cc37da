"""An analysis as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vime.agreement.analysis import Analysis
from vime.agreement.breakdown import Bin
from vime.agreement.comparison import ENGINE, TRAINER, as_text

_MOST_LAYERS = 12


def analysis_text(analysis: Analysis) -> str:
    """Tables and verdicts of one rollout."""
    lines = [as_text(analysis.comparison)]
    lines += _bins("place in the response", analysis.positions, "{:g}")
    lines += _bins("probability of the token", analysis.probabilities, "{:g}")
    if analysis.layers:
        lines.append(f"  {'hidden states, relative':<32}" + "".join(f"{n:>11}" for n in _layer_names(analysis.layers)))
        for name, values in analysis.layers.items():
            lines.append(f"  {name:<32}" + "".join(f"{v:>11.1e}" for v in _some(values)))
    for name, by_layer in analysis.flips.items():
        shares = ", ".join(f"layer {layer} {share:.2%}" for layer, share in by_layer.items())
        lines.append(f"  other experts, {name}: {shares}")
    for cause in analysis.explanations[:3]:
        if cause.holds:
            lines.append(f"  seen in it: {cause.cause}; {cause.explained:.0%} explained, multiple {cause.multiple:.2f}")
    lines += [f"  {who}: {verdict.word} - {verdict.sentence}" for who, verdict in analysis.verdicts.items()]
    return "\n".join(lines)


def _bins(title: str, by_name: Mapping[str, Sequence[Bin]], form: str) -> list[str]:
    wanted = {name: bins for name, bins in by_name.items() if name.startswith((ENGINE + " -", TRAINER + " -"))}
    if not wanted:
        return []
    some = next(iter(wanted.values()))
    lines = [f"  {title + ', from':<32}" + "".join(f"{form.format(b.low):>11}" for b in some)]
    lines.append(f"  {'tokens':<32}" + "".join(f"{b.count:>11}" for b in some))
    for name, bins in wanted.items():
        lines.append(f"  {name:<32}" + "".join(f"{b.mean:>11.1e}" if b.count else f"{'-':>11}" for b in bins))
    return lines


def _layer_names(layers: Mapping[str, Sequence[float]]) -> list[str]:
    num = len(next(iter(layers.values())))
    return _some(["embedding", *(f"layer {k}" for k in range(num - 1))])


def _some(values: Sequence[object]) -> list:  # type: ignore[type-arg]
    """All, or evenly spread ones with the first and the last."""
    if len(values) <= _MOST_LAYERS:
        return list(values)
    return [values[round(k * (len(values) - 1) / (_MOST_LAYERS - 1))] for k in range(_MOST_LAYERS)]
