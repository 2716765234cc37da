"""The table of test_ranks.py on two CUDA devices, over NCCL."""

import pytest
import torch

from tests.trainer.megatron.test_ranks import TWO, assert_all_name_the_broken_rank, assert_like_one_process, run_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("ranks"), 2, TWO, platform="cuda")


@pytest.mark.parametrize("c", TWO, ids=[c["name"] for c in TWO])
def test_two_devices_train_like_one(two_devices, c):
    several, one, folder = two_devices
    # CUDA's matmuls sum in another order for another shape.
    assert_like_one_process(c, several[c["name"]], one, folder, rtol=1e-4)
    if "breaks" in c:
        assert_all_name_the_broken_rank(c, several[c["name"]])
