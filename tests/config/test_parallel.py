"""How the ranks divide the work."""

from typing import Any

import pytest

from vime.config.parallel import parallel_sizes
from vime.errors import ConfigError

SHAPE = {"num_attention_heads": 6, "num_query_groups": 3, "ffn_hidden_size": 96, "num_layers": 3}


def test_what_model_parallel_ranks_leave_is_data_parallel() -> None:
    sizes = parallel_sizes({"tensor_model_parallel_size": 2, "context_parallel_size": 2})
    assert sizes.model == 4 and sizes.data(8) == 2
    assert parallel_sizes({}).data(3) == 3
    with pytest.raises(ConfigError, match="makes 4 ranks that work together, which does not divide the 6"):
        sizes.data(6)


@pytest.mark.parametrize(
    ("megatron", "sentence"),
    [
        ({"tensor_model_parallel_size": 2}, "does not divide the model's 3 key-value heads"),
        ({"tensor_model_parallel_size": 4}, "does not divide the model's 6 attention heads"),
        ({"pipeline_model_parallel_size": 2}, "does not divide the model's 3 layers"),
        ({"context_parallel_size": 5}, "--context-parallel-size 5 makes 5 ranks"),
        ({"context_parallel_size": 0}, "--context-parallel-size is 0; at least 1"),
        ({"sequence_parallel": True}, "give --tensor-model-parallel-size, too"),
    ],
)
def test_a_division_that_does_not_come_out_is_named(megatron: dict[str, Any], sentence: str) -> None:
    assert any(sentence in p for p in parallel_sizes(megatron).problems(12, SHAPE))


def test_a_division_that_comes_out_has_no_problem() -> None:
    megatron = {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 3, "sequence_parallel": True}
    assert not list(parallel_sizes(megatron).problems(18, SHAPE))


MOE = {**SHAPE, "num_moe_experts": 8, "moe_ffn_hidden_size": 30, "moe_shared_expert_intermediate_size": 60}
SP = {"tensor_model_parallel_size": 3, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("megatron", "sentence"),
    [
        ({"expert_model_parallel_size": 3}, "does not divide the model's 8 experts"),
        (
            {"expert_model_parallel_size": 8},
            "8 ranks that hold a layer's experts together, which does not divide the 12",
        ),
        ({"tensor_model_parallel_size": 3}, "add --sequence-parallel"),
        ({**SP, "expert_tensor_parallel_size": 2}, "it can be 1 or --tensor-model-parallel-size, which is 3"),
        (
            {**SP, "expert_model_parallel_size": 2},
            "with --expert-tensor-parallel-size 3 gathers parts of different lengths",
        ),
        ({"expert_model_parallel_size": 0}, "--expert-model-parallel-size is 0; at least 1"),
    ],
)
def test_a_division_of_experts_that_does_not_come_out_is_named(megatron: dict[str, Any], sentence: str) -> None:
    [problem] = parallel_sizes(megatron).problems(12, MOE, on_cpu=True)
    assert sentence in problem


def test_experts_are_cut_like_the_rest_unless_told_otherwise() -> None:
    assert parallel_sizes(SP).expert_tensor == 3
    assert parallel_sizes({**SP, "expert_tensor_parallel_size": 1}).expert_tensor == 1
    assert [*parallel_sizes(SP).problems(12, {**MOE, "moe_ffn_hidden_size": 16})] == [
        "--expert-tensor-parallel-size is 3, which does not divide the 16 intermediate columns of the model's experts; "
        "1 leaves experts whole"
    ]
    assert not list(parallel_sizes({**SP, "expert_model_parallel_size": 2}).problems(12, MOE))


def test_a_model_without_experts_has_none_to_divide() -> None:
    [problem] = parallel_sizes({"expert_model_parallel_size": 2}).problems(12, SHAPE)
    assert problem == "--expert-model-parallel-size is 2, but the model has no experts; leave it out"
    [problem] = parallel_sizes({"expert_tensor_parallel_size": 2}).problems(12, SHAPE)
    assert problem == "--expert-tensor-parallel-size is 2, but the model has no experts; leave it out"


def test_data_parallel_ranks_are_in_lockstep_where_they_share_out_experts() -> None:
    def in_lockstep(**sizes: int) -> bool:
        return parallel_sizes({f"{name}_parallel_size": size for name, size in sizes.items()}).in_lockstep

    assert in_lockstep(expert_model=2)
    assert in_lockstep(expert_model=4, expert_tensor=1, tensor_model=2)
    assert not in_lockstep(expert_model=2, expert_tensor=1, tensor_model=2)
    assert not in_lockstep(expert_model=2, context=2)
    assert not in_lockstep(tensor_model=2)
    # Ranks 0 to 2 and 3 to 5 share out experts, 0 to 3 and 4 to 7 micro-batches: rank 3 waits for both.
    assert in_lockstep(expert_model=3, expert_tensor=1, tensor_model=4)
    assert in_lockstep(expert_model=2, context=3)
