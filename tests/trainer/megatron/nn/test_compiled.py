import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vime
from vime.trainer.megatron.nn.compiled import compiled


@compiled(0, 1)
def doubled_sum(x, y, factor):
    return (x + y) * factor


def test_what_is_not_on_cuda_runs_as_it_is_written():
    x = torch.arange(3.0, requires_grad=True)
    out = doubled_sum(x, x.detach(), 2)
    out.sum().backward()
    assert out.tolist() == [0.0, 4.0, 8.0] and x.grad.tolist() == [2.0] * 3
    assert doubled_sum.__name__ == "doubled_sum"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_where_nothing_can_be_compiled_it_is_said():
    """In a process of its own: where the CPU shims are installed, the probe of the compiler is on the CPU."""
    code = """
import torch
from vime.trainer.megatron.nn.compiled import compiler_works
torch.compiler.set_stance = print
print(compiler_works())
"""
    env = {"PYTHONPATH": str(Path(vime.__file__).parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["force_eager", "False"], done.stderr
    assert "torch.compile does not work here" in done.stderr and "operator by operator" in done.stderr
