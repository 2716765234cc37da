"""Rows of experts that no router would give, for tests of replay."""

import numpy as np

from vime.types import RoutedExperts


def random_experts(batch, *, layers, experts, top_k, known=None, seed=0):
    """Any experts, for all of each sample's tokens but the last, or for those that `known` counts."""
    g = np.random.default_rng(seed)
    known = batch.lengths - 1 if known is None else np.asarray(known)
    rows = g.random((int(known.sum()), layers, experts)).argsort(-1)[..., :top_k]
    return RoutedExperts(rows.astype(np.uint8), known)


def some_known(batch):
    """Of each sample how many tokens: all but the last, half of them, none, all but the last, ..."""
    return np.array([(length - 1, length // 2, 0)[i % 3] for i, length in enumerate(batch.lengths)])
