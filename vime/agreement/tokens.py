"""The tokens of a rollout that one version of the weights sampled, as columns to compare scores in.

N tokens that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import DataError
from vime.loop.columns import routed_columns, support_columns
from vime.support import SamplingSupport
from vime.types import PolicyVersion, RoutedExperts, Sample

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Made by `select`; every column is [N], in the order of `sequences`."""

    samples: tuple[Sample, ...]
    sample: npt.NDArray[np.int64]
    """Which of `samples`."""
    place: npt.NDArray[np.int64]
    """Which of its tokens, prompt counted."""
    engine: Floats
    """The log-prob that the engine gave when it sampled the token."""
    trajectory: npt.NDArray[np.int64]

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Prompt and response of each sample."""
        return [sample.tokens for sample in self.samples]

    @property
    def position(self) -> npt.NDArray[np.int64]:
        """Place in the response, from 0."""
        prompts = np.array([len(s.tokens) - s.response_length for s in self.samples], np.int64)
        position: npt.NDArray[np.int64] = self.place - prompts[self.sample]
        return position

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """Which prompt its sample answers, counted from 0; samples of the same prompt have the same."""
        numbers: dict[tuple[int, ...], int] = {}
        of_samples = [numbers.setdefault(s.prompt_tokens, len(numbers)) for s in self.samples]
        prompt: npt.NDArray[np.int64] = np.array(of_samples, np.int64)[self.sample]
        return prompt

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Those that the engine used for the samples' tokens, where they are known; None where they are of none."""
        lengths = np.array([len(s) for s in self.sequences], np.int64)
        return routed_columns(self.samples, np.concatenate(self.sequences).astype(np.int32), lengths)

    @property
    def supports(self) -> list[SamplingSupport | None]:
        """Of each sequence what its tokens were sampled from; None: all of them from the whole vocabulary."""
        return [support_columns([sample], needed=False) for sample in self.samples]

    @property
    def is_narrow(self) -> bool:
        """Whether some token was sampled from a part of the vocabulary."""
        return any(s.support is not None for s in self.samples)

    def pick(self, scores: Sequence[npt.NDArray[Any]]) -> Floats:
        """[N] of scores of whole sequences, one [length] array each."""
        return np.array([scores[s][p] for s, p in zip(self.sample, self.place, strict=True)], np.float64)


def select(samples: Sequence[Sample], version: PolicyVersion | None, *, max_samples: int | None = None) -> Tokens:
    """The trainable tokens that a version sampled.

    Args:
        version: None takes all.
        max_samples: of the samples with such tokens as many, evenly spread over the rollout.
    Raises: DataError if there are none.
    """
    masks = [_mask(sample, version) for sample in samples]
    having = [i for i, mask in enumerate(masks) if mask.any()]
    if not having:
        raise DataError(f"no trainable token of the rollout's {len(samples)} samples is of version {version}")
    if max_samples is not None and len(having) > max_samples:
        having = [having[k * len(having) // max_samples] for k in range(max_samples)]
    chosen = tuple(samples[i] for i in having)
    places = [len(s.tokens) - s.response_length + np.flatnonzero(masks[i]) for s, i in zip(chosen, having, strict=True)]
    counts = [len(p) for p in places]
    engine = [np.asarray(s.rollout_log_probs, np.float64)[masks[i]] for s, i in zip(chosen, having, strict=True)]
    return Tokens(
        samples=chosen,
        sample=np.repeat(np.arange(len(chosen)), counts),
        place=np.concatenate(places),
        engine=np.concatenate(engine),
        trajectory=np.repeat([s.trajectory_id for s in chosen], counts),
    )


def _mask(sample: Sample, version: PolicyVersion | None) -> npt.NDArray[np.bool_]:
    """[R] true where the version sampled a trainable token."""
    mask = np.array(sample.loss_mask, np.bool_)
    if sample.supervised or sample.remove_sample:
        mask[:] = False
    if version is not None:
        of_version = np.zeros(len(mask), np.bool_)
        for span in sample.weight_versions:
            if span.version == version:
                of_version[span.start : span.end] = True
        mask &= of_version
    return mask
