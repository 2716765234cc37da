"""The experts of a batch are those of its samples' tokens, however it is packed and dealt out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime.config import AlgoConfig, TrainConfig
from vime.config.parallel import ParallelSizes
from vime.errors import DataError
from vime.loop.batch import make_train_batch
from vime.loop.columns import routed_columns
from vime.loop.replay import ReplayedRollouts
from vime.observability.metrics import check_names
from vime.observability.run_folder import RunFolder
from vime.observability.train_data import write_train_data
from vime.types import Group, Metrics, RoutedRows, Sample, SampleStatus, TrainBatch


def sample(number: int, prompt_len: int, response_len: int, *, routed: bool = True) -> Sample:
    """Its rows say of which sample and which token they are: [[sample, token]]."""
    made = Sample(
        tokens=range(prompt_len), group_id=number // 2, sample_id=number, trajectory_id=number, reward=number % 2
    )
    n = prompt_len + response_len - 1
    rows = RoutedRows(0, np.array([[[number, t]] for t in range(n)], np.uint8).reshape(-1, 1, 2))
    made.append_response([1] * response_len, [-1.0] * response_len, version=0, routed_experts=rows if routed else None)
    made.status = SampleStatus.COMPLETED
    return made


def groups(**of_last: Any) -> list[Group]:
    """Eight samples of different lengths; what is said of the last one."""
    samples = [sample(i, 2 + i % 3, 1 + i, **(of_last if i == 7 else {})) for i in range(8)]
    return [Group(i, samples[2 * i : 2 * i + 2]) for i in range(4)]


def make(made: list[Group], **train: Any) -> tuple[TrainBatch, Metrics]:
    batch, metrics = make_train_batch(
        made,
        rollout_id=0,
        algo=AlgoConfig(),
        train=TrainConfig(**{"use_rollout_routing_replay": True} | train),
        dp_size=2,
        sizes=ParallelSizes(),
        reward_key=None,
        global_batch_size=4,
    )
    check_names(metrics)
    return batch, metrics


@pytest.mark.parametrize("train", [{}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24}])
def test_rows_belong_to_the_tokens_of_their_sample(train: dict[str, Any]) -> None:
    made = groups()
    made[1].samples[0].remove_sample = True
    batch, metrics = make(made, **train)
    routed = batch.routed_experts
    assert routed is not None and routed.rows.dtype == np.uint8
    assert routed.known.tolist() == (batch.lengths - 1).tolist()
    for i, (start, stop) in enumerate(zip(routed.starts[:-1], routed.starts[1:], strict=True)):
        assert routed.rows[start:stop, 0].tolist() == [[i, t] for t in range(stop - start)]
    assert metrics["train/routing_replay_missing"] == metrics["train/routing_replay_missing_share"] == 0


def test_tokens_without_rows_are_counted_but_a_samples_last_one_is_not() -> None:
    made = groups(routed=False)
    of_a_tool = made[0].samples[0]
    of_a_tool.append_response([1, 1, 1], trainable=False)  # no request came after it
    batch, metrics = make(made)
    assert batch.routed_experts is not None
    lengths = batch.lengths
    assert batch.routed_experts.known.tolist() == [int(lengths[0]) - 4, *(lengths[1:7] - 1).tolist(), 0]
    missing = 3 + int(lengths[7]) - 1
    assert metrics["train/routing_replay_missing"] == missing
    assert metrics["train/routing_replay_missing_share"] == missing / (lengths - 1).sum()


def test_a_batch_of_which_nothing_is_known_has_no_rows_and_says_so() -> None:
    made = [Group(0, [sample(i, 2, 3, routed=False) for i in range(2)]), Group(1, [sample(2, 2, 3, routed=False)] * 2)]
    batch, metrics = make(made)
    assert batch.routed_experts is None and metrics["train/routing_replay_missing_share"] == 1


def test_without_the_flag_rows_that_samples_happen_to_have_are_left_alone() -> None:
    batch, metrics = make(groups(), use_rollout_routing_replay=False)
    assert batch.routed_experts is None
    assert not [name for name in metrics if "routing" in name]


def test_rows_of_different_kinds_or_for_other_tokens_are_refused() -> None:
    odd = Sample(tokens=(1, 2, 3), group_id=0, sample_id=1, routed_experts=np.zeros((2, 2, 2), np.uint8))
    samples = [sample(0, 2, 2), odd]
    tokens, lengths = np.array([0, 1, 1, 1, 1, 2, 3], np.int32), np.array([4, 3])
    with pytest.raises(DataError, match="of several kinds"):
        routed_columns(samples, tokens, lengths)
    for others, of_lengths in ((tokens[::-1], lengths), (tokens, np.array([3, 4])), (tokens[:4], np.array([4]))):
        with pytest.raises(DataError, match="made other tokens than the samples have"):
            routed_columns(samples, others, of_lengths)


def test_a_replayed_rollout_has_the_same_rows_and_a_batch_can_be_looked_at(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_rollout(0, groups(routed=False))
    want, _ = make(groups(routed=False))
    got, _ = make(ReplayedRollouts(str(tmp_path), [0]).generate(0).groups)
    assert want.routed_experts is not None and got.routed_experts is not None
    for field in dataclasses.fields(want.routed_experts):
        a, b = getattr(got.routed_experts, field.name), getattr(want.routed_experts, field.name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    write_train_data(tmp_path / "batch.npz", got)
    with np.load(tmp_path / "batch.npz") as file:
        assert file["routed_experts.known"].tolist() == got.routed_experts.known.tolist()
        assert file["routed_experts.rows"].tobytes() == got.routed_experts.rows.tobytes()
        assert "routed_experts" not in file
