"""A training batch as a file: arrays that numpy reads without pickle."""

from pathlib import Path

import numpy as np

from tests.test_types import batch, routed
from vime.observability.train_data import write_train_data


def test_a_batch_with_routed_experts_is_written_as_plain_arrays(tmp_path: Path) -> None:
    write_train_data(tmp_path / "with.npz", batch([4, 2], routed([3, 1])))
    write_train_data(tmp_path / "without.npz", batch([4, 2], None))
    columns, without = np.load(tmp_path / "with.npz"), np.load(tmp_path / "without.npz")
    assert columns["routed_experts.rows"].shape == (4, 3, 2) and columns["routed_experts.known"].tolist() == [3, 1]
    assert set(columns) - set(without) == {"routed_experts.rows", "routed_experts.known"}
