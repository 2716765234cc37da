import pytest
import torch

from vime.trainer.megatron.compiled import compiled, compiler_works


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
def test_where_nothing_can_be_compiled_it_is_said(monkeypatch):
    stances = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    with pytest.warns(UserWarning, match="torch.compile does not work here .*operator by operator"):
        assert compiler_works.__wrapped__() is False
    assert stances == ["force_eager"]
