"""What engines could have sampled, from samples to a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime.config import AlgoConfig, TrainConfig
from vime.errors import DataError
from vime.loop.batch import make_train_batch
from vime.loop.replay import ReplayedRollouts
from vime.observability.run_folder import RunFolder
from vime.types import Group, Sample, SampleStatus, SamplingSupport, TrainBatch


def group(number: int, *, narrow: bool = True) -> Group:
    """Two samples: a sampled token, a tool's, a sampled one; their supports say whose they are."""
    samples = []
    for i in (2 * number, 2 * number + 1):
        sample = Sample(tokens=(1, 2), group_id=number, sample_id=i, trajectory_id=i, reward=float(i % 2))
        sample.append_response([5], [-1.0], version=0, support=SamplingSupport.of([[5, 10 + i]]) if narrow else None)
        sample.append_response([3], trainable=False)
        sample.append_response([6], [-1.0], version=0, support=SamplingSupport.of([[6]]) if narrow else None)
        sample.status = SampleStatus.COMPLETED
        samples.append(sample)
    return Group(number, samples)


def make(groups: list[Group], *, needs_support: bool = True, **more: Any) -> TrainBatch:
    batch, _ = make_train_batch(
        groups,
        rollout_id=0,
        algo=AlgoConfig(),
        train=TrainConfig(),
        dp_size=1,
        reward_key=None,
        global_batch_size=4,
        needs_support=needs_support,
        **more,
    )
    return batch


def test_each_token_has_what_could_have_been_sampled_in_its_place(tmp_path: Path) -> None:
    groups = [group(0), group(1)]
    expected = [row for i in range(4) for row in ([], [], [5, 10 + i], [], [6])]
    support = make(groups).support
    assert support is not None and support.rows() == expected
    RunFolder(tmp_path).write_rollout(0, groups)
    again = make(ReplayedRollouts(str(tmp_path), [0]).generate(0).groups).support
    assert again is not None and again.rows() == expected


def test_a_trainable_token_without_one_is_named() -> None:
    groups = [group(0), group(1, narrow=False)]
    with pytest.raises(
        DataError, match=r"sample 2 of group 1 has a trainable token that does not say .* support=answer"
    ):
        make(groups)
    for sample in groups[1].samples:
        sample.remove_sample = True  # nothing is learnt from it
    assert make(groups).support is not None
    assert make([group(0, narrow=False), group(1, narrow=False)], needs_support=False).support is None


def test_tokens_of_other_samples_are_refused() -> None:
    class Hooks:
        def columns(self, samples: list[Sample]) -> Any:
            from vime.loop.columns import sample_columns

            columns = sample_columns(samples, None)
            return {**columns, "tokens": np.where(columns["tokens"] == 3, 4, columns["tokens"])}, {}

        def rewards(self, *_: Any, **__: Any) -> None:
            return None

    with pytest.raises(DataError, match="made other tokens than the samples have, for which engines told"):
        make([group(0), group(1)], hooks=Hooks())
