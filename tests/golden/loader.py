"""Loads the shared cases in cases/: numbers from an independent float64 oracle, described in cases/README.md."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

CASES = Path(__file__).parent / "cases"
GRADER = {"boxed": "math", "gsm8k": "gsm8k"}
"""Style of a grading case -> the reward that grades it."""


def all_cases():
    """Every numeric case, in file order (grading.json has another format)."""
    paths = (p for p in sorted(CASES.glob("*.json")) if p.name != "grading.json")
    return [case for path in paths for case in json.loads(path.read_text("utf-8"))["cases"]]


def grading_cases():
    """The cases of grading.json, in file order."""
    return json.loads((CASES / "grading.json").read_text("utf-8"))["cases"]


def each_case(*kinds, where=lambda case: True):
    """Parametrises a test over (case, dtype name), leaving out precisions that a case does not apply to."""
    chosen = [
        pytest.param(case, dtype, id=f"{case['id'].removeprefix('shared-')}-{dtype}")
        for case in all_cases()
        if case["kind"] in kinds and where(case)
        for dtype, tolerance in case["tolerance"].items()
        if tolerance is not None
    ]
    assert chosen, f"no case of kind {kinds}"
    return pytest.mark.parametrize(("case", "dtype"), chosen)


def check(got, case, key, dtype):
    """abs(got - want) <= tolerance * max(1, abs(want)), element by element; null is minus infinity, masked is 0."""
    want = flat(case["expected"][key])
    got = np.asarray(got.detach() if isinstance(got, torch.Tensor) else got, np.float64).reshape(-1)
    assert got.shape == want.shape, key
    tolerance = case["tolerance"][dtype]
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=key)
    error = np.abs(got[finite] - want[finite]) / np.maximum(1, np.abs(want[finite]))
    assert (error <= tolerance).all(), f"{key}: got {got}, want {want}"


def flat(values):
    """Nested rows of numbers, row after row, as float64."""
    if isinstance(values, list):
        return np.concatenate([flat(v) for v in values]) if values else np.zeros(0)
    return np.array([-np.inf if values is None else values], np.float64)


def columns(case, dtype, *names):
    """Ragged inputs as packed [T] tensors of the dtype."""
    return [torch.from_numpy(flat(case["inputs"][name])).to(getattr(torch, dtype)) for name in names]


def spread(values, mask):
    """[T] zeros, but `values` [P] where the mask is on: losses are of the tokens that count alone."""
    return torch.zeros(len(mask), dtype=values.dtype).index_put(((mask != 0).nonzero()[:, 0],), values)


def cu_seqlens(case, name="mask"):
    """[N + 1] borders of the ragged rows."""
    return np.cumsum([0] + [len(row) for row in case["inputs"][name]])
