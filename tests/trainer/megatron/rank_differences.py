"""How far ranks are from one process: the numbers of the parallel matrix, and everything else that must be equal."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

# Largest differences allowed; see Differences for what each is. CUDA's matmuls sum in another order for another shape.
EXACT = {"cpu": 1e-5, "cuda": 1e-4}
BF16 = {"loss": 0.05, "grad_norm": 0.2, "log_probs": 0.05}
ROUTING_MARGIN = 2e-5  # of scores of order 1, which layouts compute to about 1e-6
NUMBERS = ("loss", "grad_norm", "log_probs", "weights")


@dataclass
class Differences:
    """Largest over ranks and rollouts. None: not compared."""

    loss: float | None = None
    """Of each rollout's loss, relative; with a critic of its loss, as whitened advantages leave next to none of the
    policy's."""
    grad_norm: float | None = None
    """Of each rollout's gradient norm, relative; the critic's, too."""
    log_probs: float | None = None
    """Of any token's log-prob, before the first update and after the last; a difference of log-probs is relative. And
    of any value of a critic, relative to the largest."""
    weights: float | None = None
    """Of any element after the last update, relative to the largest of its tensor."""
    bounds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What else is wrong: another metric, a checkpoint, an export, a name in an error."""

    @property
    def is_within(self) -> bool:
        """Whether all numbers were compared, are within their bounds, and nothing else is wrong."""
        return not self.all_problems()

    def all_problems(self) -> list[str]:
        """Sentences, those of numbers beyond their bounds among them."""
        beyond = [
            f"{name} differs by {value} (bound {bound})" if value is not None else f"{name} was not compared"
            for name, bound in self.bounds.items()
            if (value := getattr(self, name)) is None or not value <= bound
        ]
        return beyond + self.problems


def differences(case, ranks, reference, folder, *, platform="cpu"):
    """Compare what each rank gave with what one process gave.

    Args: ranks: of `Outcome`; reference: the one of `case.reference`; folder: where models and exports are.
    """
    if case.option == "bf16":
        return _of_bf16(case, ranks, reference)
    bound, numbers = EXACT[platform], NUMBERS
    if case.loads:  # the first rollout was before the checkpoint
        numbers = tuple(n for n in NUMBERS if n != "log_probs")
    result = Differences(bounds=dict.fromkeys(numbers, bound))
    wanted = reference["metrics"][1:] if case.loads else reference["metrics"]
    compare_metrics(result, case, ranks, wanted, bound)
    result.weights = _largest(
        float((got - want).abs().max() / want.abs().max())
        for (_, got), (_, want) in zip(ranks[0]["last"], reference["last"], strict=True)
    )
    if not case.loads:
        result.log_probs = _largest(_log_prob_difference(rank, reference) for rank in ranks)
    result.problems += _weight_problems(case, ranks, reference, Path(folder))
    if reference["routing_margin"] < ROUTING_MARGIN:
        result.problems.append(
            f"a token chooses its experts by {reference['routing_margin']:.1e} only, which another order of sums may "
            "turn round: give the model another seed"
        )
    if case.breaks is not None:
        result.problems += _error_problems(case.breaks, ranks)
    return result


def _largest(values):
    """NaN if one is: unlike `max`, which passes over it."""
    return float(np.max(list(values)))


def _relative(got, want):
    return abs(got - want) / abs(want)


def compare_metrics(result, case, ranks, wanted, bound):
    """Loss and gradient norm into `result`; every other train/ metric within the bound, or a problem."""
    without = ("train/pg_clipfrac", "train/ratio") if case.loss == "own" else ()
    pairs = [(g, w, k) for r in ranks for k, (g, w) in enumerate(zip(r["metrics"], wanted, strict=True))]
    has_critic = case.loss == "ppo"
    loss = "train/critic-value_loss" if has_critic else "train/loss"
    norms = ["train/grad_norm", *(["train/critic-grad_norm"] if has_critic else [])]
    result.loss = _largest(_relative(got[loss], want[loss]) for got, want, _ in pairs)
    result.grad_norm = _largest(_relative(got[name], want[name]) for got, want, _ in pairs for name in norms)
    for got, want, k in pairs:
        for name in want:
            if not name.startswith(("train/", "rollout/")) or name.startswith(without):
                continue
            # A mean difference of two log-probs keeps only what float32 leaves of each.
            small = name in ("train/ppo_kl", "train/kl_loss", "train/opd_kl", "rollout/kl") or "diff" in name
            small |= case.loss == "kl in reward" and name.startswith("rollout/advantages")  # made of such differences
            # So do means of numbers of either sign.
            tiny = bound / 10 if small or (has_critic and name in ("train/loss", "train/pg_loss")) else 1e-8
            if has_critic and name.startswith("rollout/"):
                tiny = bound
            if not abs(got[name] - want[name]) <= max(tiny, bound * abs(want[name])):
                result.problems.append(f"{name} of rollout {k} is {got[name]}, of one process {want[name]}")
        if case.loss == "own" and _relative(got["custom/clipped"] + 1, want["train/pg_clipfrac"] + 1) > bound:
            result.problems.append(f"custom/clipped is {got['custom/clipped']}, not {want['train/pg_clipfrac']}")


def _log_prob_difference(rank, reference):
    columns = [(rank[name], reference[name]) for name in ("log_probs", "last_log_probs")]
    for name in ("values", "last_values"):
        if (want := reference.get(name)) is not None:
            largest = np.nanmax(np.abs(want))
            columns.append((rank[name] / largest, want / largest))
    columns += list(zip(rank["scores"], reference["scores"], strict=True))
    wanted = [~np.isnan(want) for _, want in columns]  # all but each first token
    return _largest(np.abs(got - want)[where].max() for (got, want), where in zip(columns, wanted, strict=True))


def _weight_problems(case, ranks, reference, folder):
    """Weights reach rank 0 alone: what it loaded, bit for bit; exports hold what it sends."""
    first = ranks[0]["first"]
    if [name for name, _ in first] != [name for name, _ in reference["first"]]:
        yield "the names of the weights, or their order, are not those of one process"
    if not case.loads:
        source = load_file(folder / case.model / "model.safetensors")
        if not (dict(first).keys() == source.keys() and all(torch.equal(t, source[name]) for name, t in first)):
            yield "the weights sent before the first update are not bit for bit those of the checkpoint"
    buckets = ranks[0]["buckets"]
    if not (len(buckets) > 2 and all(count > 0 for count in buckets)):
        yield f"rank 0 sends buckets of {buckets} bytes"
    if any(rank["buckets"] != [None] * len(buckets) for rank in ranks[1:]):
        yield f"ranks send {[rank['buckets'] for rank in ranks]}; rank 0 alone should"
    if case.exports:
        exported = load_file(folder / f"export {case}" / "model.safetensors")
        if not all(torch.equal(exported[name], tensor) for name, tensor in ranks[0]["last"]):
            yield "the export does not hold the weights that are sent"


def _error_problems(broken, ranks):
    """All ranks name the one whose gradient is broken; the loss breaks on all that compute the spoilt sample's."""
    for k, rank in enumerate(ranks):
        if len(rank["errors"]) != 2 or rank["errors"] != ranks[0]["errors"]:
            yield f"rank {k} raised {rank['errors']}, rank 0 {ranks[0]['errors']}"
            continue
        of_gradient, of_loss = rank["errors"]
        if f"the gradient is not finite on rank {broken} (" not in of_gradient:
            yield f"the error of rank {broken}'s gradient on rank {k}: {of_gradient}"
        if not (", rollout 7, step 4" in of_gradient and "the loss is not finite on rank " in of_loss):
            yield f"errors on rank {k}: {rank['errors']}"


def _of_bf16(case, ranks, reference):
    """bf16 against float32: means, as single tokens may be far apart."""
    result = Differences(bounds=BF16)
    pairs = [(g, w) for r in ranks for g, w in zip(r["metrics"], reference["metrics"], strict=True)]
    result.loss = _largest(_relative(got["train/entropy_loss"], want["train/entropy_loss"]) for got, want in pairs)
    result.grad_norm = _largest(_relative(got["train/grad_norm"], want["train/grad_norm"]) for got, want in pairs)
    wanted = ~np.isnan(reference["log_probs"])
    result.log_probs = _largest(np.abs(r["log_probs"] - reference["log_probs"])[wanted].mean() for r in ranks)
    return result
