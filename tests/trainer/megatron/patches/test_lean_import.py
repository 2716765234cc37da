"""A rank starts without packages that it does not use, and finds them afterwards as they were."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.inference.contexts import dynamic_context

import vime

PROGRAM = """
import importlib.util, sys, torch
compiler = torch.compile
from vime.trainer.megatron.patches.lean_import import lean_import
with lean_import():
    import vime.trainer.megatron.trainer
heavy = [name for name in ("wandb", "torch._inductor.compile_fx") if name in sys.modules]
from megatron.core.fusions import fused_bias_swiglu
print(heavy, torch.compile is compiler, importlib.util.find_spec("wandb") is not None)
print(fused_bias_swiglu.swiglu(torch.tensor([[0.0, 1.0, 2.0, 3.0]])).tolist())
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="megatron-core's functions are compiled there")
def test_megatron_is_imported_without_wandb_and_without_torchs_compiler() -> None:
    root = str(Path(vime.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=300)
    there = importlib.util.find_spec("wandb") is not None
    assert done.stdout.startswith(f"[] True {there}\n[[0.0, "), done.stdout + done.stderr


def test_megatron_still_imports_what_is_left_out() -> None:
    """Fails once it does not: then remove the name from `_UNUSED`."""
    assert hasattr(dynamic_context, "HAVE_WANDB")
