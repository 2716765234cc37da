"""A training batch as a file: arrays that numpy reads without pickle."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.test_types import batch, routed
from vime.observability.train_data import write_train_data
from vime.support import SamplingSupport


def test_a_batch_with_routed_experts_is_written_as_plain_arrays(tmp_path: Path) -> None:
    write_train_data(tmp_path / "with.npz", batch([4, 2], routed([3, 1])))
    write_train_data(tmp_path / "without.npz", batch([4, 2], None))
    columns, without = np.load(tmp_path / "with.npz"), np.load(tmp_path / "without.npz")
    assert columns["routed_experts.rows"].shape == (4, 3, 2) and columns["routed_experts.known"].tolist() == [3, 1]
    assert set(columns) - set(without) == {"routed_experts.rows", "routed_experts.known"}


def test_every_column_of_a_batch_is_read_without_pickle(tmp_path: Path) -> None:
    plain = batch([4, 2], None)
    ids = plain.tokens.astype(np.int32)
    narrow = replace(plain, support=SamplingSupport(ids, np.arange(len(ids) + 1)))
    for name, given in {"plain": plain, "narrow": narrow}.items():
        write_train_data(tmp_path / f"{name}.npz", given)
        file = np.load(tmp_path / f"{name}.npz")
        columns = {column: file[column] for column in file}
        assert ("support.ids" in columns, "support.starts" in columns) == (name == "narrow",) * 2
    assert np.array_equal(columns["support.ids"], ids)
