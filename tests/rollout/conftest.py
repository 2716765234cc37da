"""What the rollout's tests share."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from vime.rewards.pool import GraderPool


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return char_tokenizer()


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    pool = GraderPool()
    yield pool
    pool.close()
