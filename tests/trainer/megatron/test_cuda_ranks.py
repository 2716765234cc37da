"""The parallel matrix on two CUDA devices, over NCCL. On four: run_matrix --device cuda."""

import pytest
import torch

from tests.trainer.megatron.matrix import MATRIX
from tests.trainer.megatron.run_matrix import rows_of, run_cases

TWO = [case for case in MATRIX if case.world_size == 2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return run_cases(folder, TWO, platform="cuda"), folder


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_devices_train_like_one(two_devices, case):
    outcomes, folder = two_devices
    [(row, problems)] = rows_of([case], outcomes, folder, platform="cuda")
    print(*row)
    assert not problems, problems
