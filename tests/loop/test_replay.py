"""Rollouts from files: the same groups, and therefore the same batch, to the last bit."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from vime.config import AlgoConfig, TrainConfig
from vime.errors import ConfigError, EngineError
from vime.loop.batch import make_train_batch
from vime.loop.recorder import Copies, Recorder
from vime.loop.replay import NoPrompts, ReplayedRollouts
from vime.loop.rollout_only import run_rollout_only
from vime.observability.progress import RunProgress
from vime.observability.run_folder import RunFolder
from vime.observability.writers import JsonlWriter
from vime.types import Group, RolloutResult, Sample, SampleStatus, TrainBatch


def make_groups(rollout_id: int, *, supervised: bool = False) -> list[Group]:
    rng = np.random.default_rng(rollout_id)
    groups = []
    for g in range(4):
        samples = []
        for i in range(2):
            s = Sample(
                tokens=(1, 2),
                group_id=g,
                sample_id=2 * g + i,
                trajectory_id=2 * g + i,
                reward=None if supervised else float(rng.random()),
                status=SampleStatus.COMPLETED,
            )
            n = 1 + int(rng.integers(5))
            tokens = rng.integers(0, 50, n).tolist()
            if supervised:
                s.append_response(tokens, supervised=True)
            else:
                s.append_response(tokens, (-rng.random(n)).tolist(), version=rollout_id)
            samples.append(s)
        groups.append(Group(g, samples))
    return groups


def batch_of(groups: list[Group], algo: AlgoConfig) -> TrainBatch:
    return make_train_batch(
        groups, rollout_id=0, algo=algo, train=TrainConfig(), dp_size=1, reward_key=None, global_batch_size=4
    )[0]


@pytest.mark.parametrize("loss", ["policy_loss", "sft_loss"])
def test_a_replayed_rollout_makes_the_same_batch(tmp_path: Path, loss: str) -> None:
    groups = make_groups(3, supervised=loss == "sft_loss")
    RunFolder(tmp_path).write_rollout(3, groups)
    replayed = ReplayedRollouts(str(tmp_path), [3]).generate(3).groups
    want, got = (batch_of(g, AlgoConfig(loss_type=loss)) for g in (groups, replayed))
    for field in dataclasses.fields(TrainBatch):
        a, b = getattr(got, field.name), getattr(want, field.name)
        assert a.tobytes() == b.tobytes() if isinstance(b, np.ndarray) else a == b, field.name


def test_the_files_may_be_named_by_pattern_and_must_be_there(tmp_path: Path) -> None:
    for rollout_id in (0, 1):
        RunFolder(tmp_path).write_rollout(rollout_id, make_groups(rollout_id))
    pattern = str(tmp_path / "rollouts" / "rollout_{rollout_id:06d}.parquet")
    rollouts = ReplayedRollouts(pattern, range(2))
    assert rollouts.generate(1).groups == make_groups(1)
    with pytest.raises(ConfigError, match=r"1 of 3 files are not there, first .*rollout_000002\.parquet"):
        ReplayedRollouts(str(tmp_path), range(3))
    with pytest.raises(EngineError, match="rollout 0 cannot be evaluated"):
        rollouts.evaluate(0)


@pytest.mark.parametrize(("part", "kept"), [(1.0, 4), (0.5, 2), (0.3, 2), (0.01, 1)])
def test_a_subsample_keeps_whole_groups_and_at_least_one(tmp_path: Path, part: float, kept: int) -> None:
    RunFolder(tmp_path).write_rollout(0, make_groups(0))
    groups = ReplayedRollouts(str(tmp_path), [0], subsample=part).generate(0).groups
    assert groups == make_groups(0)[:kept]


def test_a_replay_has_no_prompts_and_says_so_in_its_state() -> None:
    source = NoPrompts()
    source.restore({"format": 1, "offset": 8})
    assert source.state() == {"replayed": True} and source.epoch_size() is None
    with pytest.raises(EngineError, match="no prompts"):
        source.get_groups(1)
    with pytest.raises(EngineError, match="no prompts"):
        source.put_back([Group(0, [])])


class Generator:
    def generate(self, rollout_id: int) -> RolloutResult:
        return RolloutResult(make_groups(rollout_id), {"rollout/generated_reward": float(rollout_id)})

    def evaluate(self, rollout_id: int) -> RolloutResult:
        raise AssertionError("nothing is evaluated")


def test_generation_alone_keeps_rollouts_and_metrics_and_its_copies_can_be_replayed(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    copies = Copies(rollout_data=str(tmp_path / "new" / "{rollout_id}.parquet"))
    recorder = Recorder(RunFolder(tmp_path), RunProgress(3), writer, copies=copies)
    run_rollout_only(Generator(), recorder, start=1, num_rollout=3)
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rollout/generated_reward"]) for row in rows] == [(1, 1.0), (2, 2.0)]
    assert "perf/rollout_time" in rows[0] and "perf/train_time" not in rows[0]
    for text in (str(tmp_path), str(tmp_path / "new" / "{rollout_id}.parquet")):
        assert ReplayedRollouts(text, [1, 2]).generate(2).groups == make_groups(2)


def test_the_trainers_batch_can_be_looked_at(tmp_path: Path) -> None:
    recorder = Recorder(
        RunFolder(tmp_path),
        RunProgress(1),
        JsonlWriter(tmp_path / "metrics.jsonl"),
        copies=Copies(train_data=str(tmp_path / "t_{rollout_id}.npz")),
    )
    batch = dataclasses.replace(batch_of(make_groups(0), AlgoConfig()), extra={"mine": np.arange(3)})
    with recorder.step(5) as step:
        step.keep_batch(batch)
    saved = np.load(tmp_path / "t_5.npz")
    np.testing.assert_array_equal(saved["advantages"], batch.advantages)
    np.testing.assert_array_equal(saved["extra.mine"], np.arange(3))
    assert json.loads(str(saved["steps"])) == json.loads(json.dumps(batch.steps))
    assert int(saved["global_batch_size"]) == 4
