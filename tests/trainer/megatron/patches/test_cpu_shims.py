"""Each group of CPU shims is still needed: without it, megatron-core 0.16.1 fails on a machine without CUDA.

Every case runs in a process of its own, because the shims change torch for the whole process.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vime

STEP = """
import sys, warnings
warnings.simplefilter("ignore")
from vime.trainer.megatron.patches import cpu_shims
from vime.trainer.megatron.patches.lean_import import lean_import
with lean_import():
    from vime.trainer.megatron.trainer import MegatronTrainer
if sys.argv[1] != "none":
    setattr(cpu_shims, sys.argv[1], lambda: None)
import numpy as np
from vime.config import Config
from vime.platform import get_platform
from vime.types import TrainBatch
full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
t = MegatronTrainer(
    Config(megatron={"lr": 1e-3, **full}), hf_path=sys.argv[2], rank=0, world_size=1, total_steps=1, writer=None,
    platform=get_platform("cpu"), init_method="file://" + sys.argv[3],
)
n = 6
print(t.train(TrainBatch(
    rollout_id=0, tokens=np.arange(n, dtype=np.int32), cu_seqlens=np.array([0, n]),
    loss_mask=np.array([0] + [1] * (n - 1), np.uint8), rollout_log_probs=np.full(n, -1, np.float32),
    loss_weights=np.array([0] + [0.2] * (n - 1), np.float32), advantages=np.ones(1, np.float32),
    rewards=np.ones(1, np.float32), group_ids=np.zeros(1, np.int64), trajectory_ids=np.zeros(1, np.int64),
    steps=((((0,),),),), global_batch_size=1, truncated=np.zeros(1, bool),
))["train/grad_norm"])
t.close()
"""


def one_step(folder, rendezvous, without):
    return subprocess.run(
        [sys.executable, "-c", STEP, without, str(folder), str(rendezvous)],
        capture_output=True,
        text=True,
        timeout=900,
        env={"PYTHONPATH": str(Path(vime.__file__).parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )


def test_with_all_shims_a_step_runs(model_folder, tmp_path):
    folder, _ = model_folder()
    done = one_step(folder, tmp_path / "r", "none")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shims are for machines without CUDA")
@pytest.mark.parametrize("group", ["_devices", "_factories", "_streams", "_random_state", "_type_names"])
def test_without_one_group_it_fails(model_folder, tmp_path, group):
    folder, _ = model_folder()
    done = one_step(folder, tmp_path / "r", group)
    assert done.returncode != 0, f"{group} is no longer needed"


def test_transformers_loads_a_model_rightly_after_the_shims(model_folder):
    folder, _ = model_folder()
    program = """
import sys
import vime.trainer.megatron.trainer  # torch's compiler is loaded by megatron-core, before the shims
from vime.trainer.megatron.patches import cpu_shims
cpu_shims.install()
from transformers import AutoModelForCausalLM
frequencies = AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.rotary_emb.inv_freq
assert frequencies[0] == 1 and (frequencies[1:] < frequencies[:-1]).all() and (frequencies > 0).all(), frequencies
"""
    root = str(Path(vime.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program, str(folder)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_experts_dispatcher_still_leaves_split_sizes_in_tensors_on_a_cpu():
    code = (
        "import torch; from megatron.core.transformer.moe import moe_utils, token_dispatcher as t; "
        "from vime.trainer.megatron.nn import experts; from vime.trainer.megatron.patches import cpu_shims; "
        "two = torch.ones(2); "
        "print(type(t.maybe_move_tensor_to_cpu(two, as_numpy=True)).__name__); cpu_shims._split_sizes(); "
        "print(type(t.maybe_move_tensor_to_cpu(two, as_numpy=True)).__name__)"
    )
    env = {"PYTHONPATH": str(Path(vime.__file__).parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["Tensor", "ndarray"], done.stderr


def test_torchs_compiler_can_be_loaded_after_the_shims():
    """vLLM does, in a process that has trained before; it keeps a rule for each of torch's functions."""
    code = """
from vime.trainer.megatron.patches import cpu_shims
cpu_shims.install()
from torch._dynamo import trace_rules
assert len(trace_rules.get_torch_obj_rule_map()) > 1000
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
