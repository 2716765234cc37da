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
