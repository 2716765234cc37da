"""Experts against plain formulas, one expert after the other: outputs, gradients, empty experts, checkpoints."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.trainer.megatron.nn.experts import Groups, StackedExperts, grouped_linear, uses_grouped_kernel
from vime.trainer.megatron.patches import cpu_shims

HIDDEN, WIDTH = 16, 24
COUNTS = {
    "uneven": (3, 0, 9, 1),
    "all to one": (0, 0, 13, 0),
    "even": (4, 4, 4, 4),
    "first and last empty": (0, 5, 2, 0),
    "none": (0, 0, 0, 0),
}
EACH = pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def on_a_cpu_without_cuda():
    if not torch.cuda.is_available():
        cpu_shims.install()


@dataclass
class Ranks:
    """A process group as the experts see it."""

    number: int = 0
    count: int = 1

    def rank(self):
        return self.number

    def size(self):
        return self.count


def make_experts(*, ep=(0, 1), tp=(0, 1), dtype=torch.float32, experts=4, device="cpu", **settings):
    groups = ProcessGroupCollection(ep=Ranks(*ep), expt_tp=Ranks(*tp), expt_dp=Ranks())
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=experts,
        moe_ffn_hidden_size=WIDTH,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        init_method_std=0.3,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        **settings,
    )
    torch.manual_seed(0)
    return StackedExperts(experts // ep[1], config, groups).to(device)


def one_by_one(x, gate_up, down, counts, probs):
    """The experts' outputs without any grouping."""
    out = []
    for rows, weights, both, last in zip(x.split(list(counts)), probs.split(list(counts)), gate_up, down, strict=True):
        gate, up = both
        hidden = F.silu(F.linear(rows, gate)) * F.linear(rows, up)
        out.append(F.linear((hidden * weights[:, None]).to(rows.dtype), last))
    return torch.cat(out)


def inputs(counts, dtype, device="cpu"):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), HIDDEN, generator=g).to(device, dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=g).to(device).requires_grad_()
    up = torch.randn(sum(counts), HIDDEN, generator=g).to(device, dtype)
    return x, probs, up


def assert_like_one_by_one(experts, counts, dtype, device="cpu"):
    x, probs, up = inputs(counts, dtype, device)
    got, bias = experts(x, torch.tensor(counts), probs)
    want = one_by_one(x, experts.gate_up, experts.down, counts, probs)
    wrt = (x, probs, experts.gate_up, experts.down)
    want_grads = torch.autograd.grad((want * up).sum(), wrt)
    (got * up).sum().backward()
    got_grads = [t.grad for t in wrt]
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    assert bias is None and got.dtype == dtype
    torch.testing.assert_close(got, want, **tolerance)
    for name, ours, theirs in zip(("x", "probs", "gate_up", "down"), got_grads, want_grads, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    for e in [e for e, count in enumerate(counts) if not count]:
        assert not experts.gate_up.grad[e].any() and not experts.down.grad[e].any()


@EACH
@DTYPES
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_outputs_and_gradients_are_those_of_each_expert_alone(counts, dtype, recompute):
    settings = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]} if recompute else {}
    experts = make_experts(dtype=dtype, **settings)
    assert experts.uses_kernel
    assert_like_one_by_one(experts, counts, dtype)


@EACH
@DTYPES
def test_torchs_grouped_product_gives_the_very_numbers_of_single_ones(counts, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(4, WIDTH, HIDDEN, generator=g).to(dtype).requires_grad_()
    up = torch.randn(sum(counts), WIDTH, generator=g).to(dtype)
    results = []
    for with_offsets in (True, False):
        out = grouped_linear(x, weight, Groups.of(torch.tensor(counts), x.device, with_offsets=with_offsets))
        results.append((out, *torch.autograd.grad((out * up).sum(), (x, weight))))
    for grouped, single in zip(*results, strict=True):
        torch.testing.assert_close(grouped, single, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "widths", "fits"),
    [
        (torch.bfloat16, (16, 24), True),
        (torch.bfloat16, (16, 20), False),
        (torch.float32, (16, 20), True),
        (torch.float32, (16, 18), False),
        (torch.float16, (16, 24), False),
    ],
)
def test_the_kernel_is_used_where_rows_are_whole_multiples_of_16_bytes(dtype, widths, fits):
    assert uses_grouped_kernel(dtype, *widths) is fits


@pytest.mark.parametrize("counts", [COUNTS["uneven"], COUNTS["none"]])
def test_widths_that_the_kernel_does_not_take_are_multiplied_one_by_one(counts):
    x = torch.randn(sum(counts), 6, requires_grad=True)
    weight = torch.randn(4, 5, 6, requires_grad=True)
    assert not uses_grouped_kernel(x.dtype, 6, 5)
    out = grouped_linear(x, weight, Groups.of(torch.tensor(counts), x.device, with_offsets=False))
    want = torch.cat([F.linear(rows, w) for rows, w in zip(x.split(list(counts)), weight, strict=True)])
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.sum(), (x, weight))
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), (x, weight)))


def test_fresh_weights_do_not_depend_on_the_layout():
    whole = make_experts()
    for ep in ((0, 2), (1, 2)):
        for tp in ((0, 2), (1, 2)):
            part = make_experts(ep=ep, tp=tp)
            rows, columns = slice(2 * ep[0], 2 * ep[0] + 2), slice(12 * tp[0], 12 * tp[0] + 12)
            assert torch.equal(part.gate_up, whole.gate_up[rows, :, columns])
            assert torch.equal(part.down, whole.down[rows, :, columns])


def test_a_checkpoint_holds_plain_cuts_of_all_experts():
    part = make_experts(ep=(1, 2), tp=(1, 2))
    tensors = part.sharded_state_dict("layers.0.experts.", ((0, 3, 7),))
    gate_up, down = tensors["layers.0.experts.gate_up"], tensors["layers.0.experts.down"]
    assert gate_up.global_shape == (7, 4, 2, WIDTH, HIDDEN) and gate_up.global_offset == (3, 2, 0, WIDTH // 2, 0)
    assert down.global_shape == (7, 4, HIDDEN, WIDTH) and down.global_offset == (3, 2, 0, WIDTH // 2)
    assert gate_up.data is part.gate_up


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EACH
@DTYPES
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_on_cuda_outputs_and_gradients_are_those_of_each_expert_alone(counts, dtype, recompute, monkeypatch):
    settings = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]} if recompute else {}
    experts = make_experts(dtype=dtype, device="cuda", **settings)
    assert experts.uses_kernel
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert_like_one_by_one(experts, counts, dtype, "cuda")
