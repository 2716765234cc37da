"""Every family on one CUDA device against the CPU: float32 to 1e-4, bf16 to the bounds of `rank_differences.BF16`."""

import pytest
import torch

from tests.trainer.conftest import write_model
from tests.trainer.megatron.layout_case import MODELS, Case, with_batches
from tests.trainer.megatron.rank_differences import differences
from tests.trainer.megatron.rank_processes import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES = [Case("DP1", m, o) for m in ("qwen3", "llama", "qwen2", "moe", "glm", "glm groups") for o in ("", "bf16")]
CASES += [Case("DP1", "moe", replay="engine"), Case("DP1", "glm", "recompute experts", replay="engine")]
CASES += [Case("DP1", "glm groups", "recompute full", replay="engine"), Case("DP1", "moe", replay="own")]


def outcomes_of(folder, platform, cases):
    folder.mkdir()
    for model in dict.fromkeys(c.model for c in cases):
        write_model(folder / model, **MODELS[model])
    ranks = Ranks(folder, 1, [with_batches(c, 1) for c in cases], platform=platform)
    return {str(case): outcome for case, outcome in ranks.outcomes()}


@pytest.fixture(scope="module")
def on_both(tmp_path_factory):
    """(outcomes on CUDA, outcomes of float32 on the CPU, folder of models)."""
    folder = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # megatron-core takes any device that it sees
        cpu = outcomes_of(folder / "cpu", "cpu", list(dict.fromkeys(c.reference for c in CASES)))
    return outcomes_of(folder / "cuda", "cuda", CASES), cpu, folder / "cuda"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_trains_on_cuda_as_on_the_cpu(on_both, case):
    cuda, cpu, folder = on_both
    got, want = cuda[str(case)], cpu[str(case.reference)]
    assert not got.failure and not want.failure, got.failure or want.failure
    result = differences(case, got.ranks, want.ranks[0], folder, platform="cuda")
    print(case, result)
    assert result.is_within, result.all_problems()
