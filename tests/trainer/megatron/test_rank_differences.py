"""What the parallel matrix calls a difference: each kind of wrong number makes a row fail."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.trainer.megatron.layout_case import Case
from tests.trainer.megatron.rank_differences import differences

NAN = float("nan")
CASE = Case("TP2", "model", breaks=1)
METRICS = {"train/loss": 0.5, "train/grad_norm": 2.0, "train/entropy_loss": 3.0, "train/ppo_kl": 0.0}
WEIGHTS = [("a", torch.tensor([1.0, -2.0])), ("b", torch.tensor([0.1])), ("c", torch.tensor([5.0]))]
ERRORS = [
    "the gradient is not finite on rank 1 (tensor 1), rollout 7, step 4",
    "the loss is not finite on rank 0 (tensor 0), rollout 7, step 4",
]


def result():
    return {
        "metrics": [dict(METRICS) for _ in range(3)],
        "log_probs": np.array([NAN, -1.0, -4.0], np.float32),
        "last_log_probs": np.array([NAN, -1.5, -4.5], np.float32),
        "scores": [np.array([NAN, -3.0], np.float32)],
        "first": copy.deepcopy(WEIGHTS),
        "last": copy.deepcopy(WEIGHTS),
        "buckets": [4, 4, 4],
        "errors": list(ERRORS),
        "routing_margin": float("inf"),
    }


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "model").mkdir()
    save_file(dict(WEIGHTS), tmp_path / "model" / "model.safetensors")

    def of(change=lambda first, second, reference: None):
        first, second, reference = result(), result(), result()
        second["buckets"] = [None] * 3
        change(first, second, reference)
        return differences(CASE, [first, second], reference, tmp_path).all_problems()

    return of


def test_equal_numbers_have_no_problem(problems):
    assert problems() == []


def put(path, value):
    """A change of the second rank, or of the first where only it has the numbers."""

    def change(first, second, reference):
        of = first if path[0] in ("first", "last", "buckets") else reference if path[0] == "routing_margin" else second
        for key in path[:-1]:
            of = of[key]
        of[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("metrics", 1, "train/loss"), 0.50001, "loss differs by 1.99"),
        (("metrics", 2, "train/loss"), NAN, "loss differs by nan"),
        (("metrics", 2, "train/grad_norm"), 2.0001, "grad_norm differs by"),
        (("metrics", 0, "train/entropy_loss"), 3.0001, "train/entropy_loss of rollout 0 is 3.0001, of one process 3.0"),
        (("metrics", 0, "train/ppo_kl"), NAN, "train/ppo_kl of rollout 0 is nan"),
        (("log_probs", 2), -4.0001, "log_probs differs by"),
        (("last_log_probs", 1), NAN, "log_probs differs by nan"),
        (("last", 1, 1, 0), 0.1001, "weights differs by"),
        (("last", 2, 1, 0), NAN, "weights differs by nan"),
        (("first", 0, 1, 0), 1.0000001, "not bit for bit those of the checkpoint"),
        (("buckets",), [12], "rank 0 sends buckets of [12] bytes"),
        (("errors",), ERRORS[:1], "rank 1 raised"),
        (("routing_margin",), 1e-6, "another seed"),
    ],
)
def test_a_wrong_number_is_a_problem(problems, path, value, problem):
    assert any(problem in found for found in problems(put(path, value))), problems(put(path, value))
