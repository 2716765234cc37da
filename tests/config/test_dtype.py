from typing import Any

import pytest

from vime.config.dtype import run_dtype, stored_dtype
from vime.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_an_engine_serves_in_the_checkpoints_dtype(config: dict[str, Any], dtype: str) -> None:
    assert stored_dtype(config) == dtype


def test_a_checkpoint_without_a_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no dtype"):
        stored_dtype({})
    with pytest.raises(ConfigError, match="float8"):
        stored_dtype({"dtype": "float8_e4m3fn"})


@pytest.mark.parametrize(
    ("megatron", "checkpoint", "want"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({}, "float32", "float32"),
        ({"bf16": True}, "float32", "bfloat16"),
        ({"bf16": False}, "bfloat16", "float32"),
    ],
)
def test_engines_serve_in_the_dtype_that_the_trainer_trains_in(
    megatron: dict[str, Any], checkpoint: str, want: str
) -> None:
    assert run_dtype(megatron, {"dtype": checkpoint}) == want
