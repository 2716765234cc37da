"""The synchronous loop on fakes of its protocols: what it calls, in which order, and what it writes."""

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.loop.cadence import Cadence, StopRule
from vime.loop.evaluation_only import run_evaluation_only
from vime.loop.recorder import Recorder
from vime.loop.sync import Stages, run_sync
from vime.observability.progress import RunProgress
from vime.observability.rollout_file import read_rollout
from vime.observability.run_folder import RunFolder
from vime.observability.start_times import StartTimes
from vime.observability.writers import JsonlWriter
from vime.types import Group, RolloutResult, Sample


class World:
    """All stages at once; `calls` is the order they were called in."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.settled: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self.learnt: list[tuple[int, list[int]]] = []

    def generate(self, rollout_id: int) -> RolloutResult:
        self.calls.append(f"generate {rollout_id} at v{self.version}")
        return RolloutResult([Group(0, [])], {"rollout/raw_reward": 0.5})

    def evaluate(self, rollout_id: int) -> RolloutResult:
        self.calls.append(f"evaluate {rollout_id} at v{self.version}")
        return RolloutResult([Group(0, [])], {"eval/heldout": 0.25})

    def train(self, batch: Any) -> dict[str, float]:
        self.calls.append(f"train {batch}")
        return {"train/loss": 1.0}

    def publish(self, version: int) -> int:
        self.version = version
        self.calls.append(f"publish v{self.version}")
        return self.version

    def make_batch(self, rollout_id: int, groups: list[Group]) -> Any:
        return f"batch {rollout_id}", {"rollout/advantages": 0.0}

    def trained(self, rollout_id: int, groups: Sequence[Group]) -> None:
        self.learnt.append((rollout_id, [group.group_id for group in groups]))

    def save(self, rollout_id: int, metrics: dict[str, float]) -> None:
        assert "train/policy_version" in metrics
        self.calls.append(f"save {rollout_id}")

    def export_hf(self, rollout_id: int) -> None:
        self.calls.append(f"export {rollout_id}")

    def settle(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.settled.append((rollout_id, dict(metrics)))

    def finish(self) -> None:
        self.finished = True

    def stages(self) -> Stages:
        return Stages(
            rollout=self,
            trainer=self,  # type: ignore[arg-type]  # the loop asks only `train` of it
            publisher=self,
            make_batch=self.make_batch,
            checkpoints=self,
        )


def run(
    world: World,
    folder: Path,
    cadence: Cadence,
    *,
    start: int = 0,
    eval_before: bool = True,
    stop: StopRule | None = None,
) -> list[dict[str, Any]]:
    writer = JsonlWriter(folder / "metrics.jsonl")
    recorder = Recorder(RunFolder(folder), RunProgress(cadence.num_rollout), writer)
    run_sync(world.stages(), cadence, recorder, start=start, eval_before=eval_before, stop=stop or StopRule())
    writer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_rollout_is_generated_by_the_weights_trained_on_the_one_before(tmp_path: Path) -> None:
    world = World()
    run(world, tmp_path, Cadence(2, eval_interval=2, save_interval=1, evaluates=True, saves=True))
    assert world.calls == [
        "publish v1",
        "evaluate -1 at v1",
        "generate 0 at v1",
        "train batch 0",
        "save 0",
        "publish v2",
        "generate 1 at v2",
        "train batch 1",
        "save 1",
        "publish v3",
        "evaluate 1 at v3",
    ]
    assert world.finished


class TakingTurns:
    """Notes who has the devices; every stage but generation and evaluation is the trainer's."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def to_training(self, *, weights_follow: bool) -> None:
        self.calls.append(f"to training, {'weights follow' if weights_follow else 'weights stay'}")

    def to_generation(self) -> None:
        self.calls.append("to generation")

    def take_metrics(self) -> dict[str, float]:
        return {"perf/sleep_time": 0.25}


def test_trainer_and_engines_take_turns(tmp_path: Path) -> None:
    world = World()
    stages = replace(world.stages(), turns=TakingTurns(world.calls))  # type: ignore[arg-type]
    world.stages = lambda: stages  # type: ignore[method-assign]
    cadence = Cadence(3, eval_interval=1, save_interval=1, publish_interval=2, evaluates=True, saves=True)
    rows = run(world, tmp_path, cadence, eval_before=False)
    assert [call.partition(" at")[0] for call in world.calls] == [
        *("publish v1", "generate 0", "to training, weights stay", "train batch 0", "save 0"),
        *("to generation", "evaluate 0"),
        *("generate 1", "to training, weights follow", "train batch 1", "save 1", "publish v3"),
        *("to generation", "evaluate 1"),
        *("generate 2", "to training, weights follow", "train batch 2", "save 2", "publish v4"),
        *("to generation", "evaluate 2"),
    ]
    assert rows[0]["perf/sleep_time"] == 0.25 and {"perf/to_training_time", "perf/to_generation_time"} < set(rows[0])


def test_a_run_that_stops_early_evaluates_and_saves_at_its_end(tmp_path: Path) -> None:
    world = World()
    stop = StopRule("rollout/raw_reward", above=0.5, window=2)
    run(world, tmp_path, Cadence(9, evaluates=True, saves=True), eval_before=False, stop=stop)
    assert world.calls[-4:] == ["train batch 1", "save 1", "publish v3", "evaluate 1 at v3"]


def test_a_step_is_settled_after_its_evaluation_and_hf_checkpoints_are_written_when_due(tmp_path: Path) -> None:
    world = World()
    cadence = Cadence(3, eval_interval=2, evaluates=True, exports=True, export_interval=2)
    run(world, tmp_path, cadence, eval_before=False)
    assert [call for call in world.calls if call.startswith("export")] == ["export 1", "export 2"]
    assert [(rollout_id, metrics.get("eval/heldout")) for rollout_id, metrics in world.settled] == [
        (0, None),
        (1, 0.25),
        (2, 0.25),
    ]


def test_engines_keep_their_weights_for_the_interval_and_get_the_last_ones(tmp_path: Path) -> None:
    world = World()
    rows = run(world, tmp_path, Cadence(5, publish_interval=2, eval_interval=2, evaluates=True), eval_before=False)
    assert [call for call in world.calls if not call.startswith("train")] == [
        "publish v1",
        "generate 0 at v1",
        "generate 1 at v1",
        "publish v3",
        "evaluate 1 at v3",
        "generate 2 at v3",
        "generate 3 at v3",
        "publish v5",
        "evaluate 3 at v5",
        "generate 4 at v5",
        "publish v6",
        "evaluate 4 at v6",
    ]
    assert [row["train/policy_version"] for row in rows] == [1, 1, 3, 3, 5]


def test_a_resumed_run_publishes_before_it_generates(tmp_path: Path) -> None:
    world = World()
    run(world, tmp_path, Cadence(6), start=5, eval_before=False)
    assert world.calls == ["publish v6", "generate 5 at v6", "train batch 5", "publish v7"]


def test_a_run_that_its_rule_has_stopped_does_nothing_more_when_it_is_resumed(tmp_path: Path) -> None:
    stopped, stop = (StopRule("rollout/raw_reward", above=0.5, window=2) for _ in range(2))
    for _ in range(2):
        stopped.reached({"rollout/raw_reward": 0.5})
    stop.restore(stopped.state())
    world = World()
    run(world, tmp_path, Cadence(9, evaluates=True, saves=True), start=2, stop=stop)
    assert world.calls == []


def test_stage_times_add_up_to_the_step_and_every_stage_reports(tmp_path: Path) -> None:
    rows = run(World(), tmp_path, Cadence(2, evaluates=True))
    assert [row["step"] for row in rows] == [-1, 0, 1]
    assert rows[0]["eval/heldout"] == 0.25
    for row in rows[1:]:
        stages = [v for k, v in row.items() if k.startswith("perf/") and k.endswith("_time") and k != "perf/step_time"]
        assert sum(stages) == pytest.approx(row["perf/step_time"], abs=1e-9)
        assert row["train/policy_version"] == row["step"] + 1
    assert (tmp_path / "rollouts" / "rollout_000001.parquet").exists()
    assert sorted(p.name for p in (tmp_path / "evaluations").iterdir()) == [
        "before_training.parquet",
        "rollout_000001.parquet",
    ]


def test_a_run_that_only_evaluates_writes_one_row_the_samples_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    recorder = Recorder(RunFolder(tmp_path), RunProgress(), writer)
    run_evaluation_only(world, recorder, rollout_id=41)
    writer.close()
    assert world.calls == ["evaluate 41 at v0"]
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["step"], row["eval/heldout"]) == (41, 0.25)
    assert row["perf/eval_time"] > 0
    assert (tmp_path / "evaluations" / "rollout_000041.parquet").exists()
    assert "heldout   0.250" in capsys.readouterr().out


def test_a_failing_stage_ends_the_run_and_leaves_no_half_written_step(tmp_path: Path) -> None:
    world = World()
    world.train = lambda batch: (_ for _ in ()).throw(RuntimeError("rank 0 died"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="rank 0 died"):
        run(world, tmp_path, Cadence(2), eval_before=False)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_levels_0_1_and_4_import_without_ray_vllm_and_megatron() -> None:
    program = """
        import pkgutil, importlib, sys
        for hidden in ("ray", "vllm", "megatron"):
            sys.modules[hidden] = None
        import vime
        levels = ("types", "errors", "wire", "protocols", "config", "algo", "data", "models", "rewards", "platform",
                  "observability", "loop")
        for level in levels:
            module = importlib.import_module(f"vime.{level}")
            for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"vime.{level}."):
                importlib.import_module(info.name)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_what_the_start_took_is_written_with_the_first_step_alone(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    recorder = Recorder(RunFolder(tmp_path), RunProgress(2), writer, times=StartTimes())
    run_sync(World().stages(), Cadence(2, None, None), recorder, start=0, eval_before=False, stop=StopRule())
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [any(name.startswith("start/") for name in row) for row in rows if row["step"] >= 0] == [True, False]
    assert rows[0]["start/update_weights_s"] <= rows[0]["start/total_s"]


def test_a_rollout_is_written_while_the_block_runs_and_is_whole_when_it_ends(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    recorder = Recorder(RunFolder(tmp_path), RunProgress(1), writer)
    groups = [Group(0, [Sample(prompt="p", tokens=(1, 2), group_id=0, sample_id=0, trajectory_id=0)])]
    with recorder.step(0) as step:
        with step.rollout_kept_meanwhile(groups):
            pass
        assert [g.group_id for g in read_rollout(RunFolder(tmp_path).rollout_path(0))] == [0]
        shutil.rmtree(tmp_path / "rollouts")
        (tmp_path / "rollouts").write_text("no folder")
        with pytest.raises(OSError), step.rollout_kept_meanwhile(groups):
            pass
        with pytest.raises(ValueError, match="the block"), step.rollout_kept_meanwhile(groups):
            raise ValueError("the block's own error is the cause")


def test_what_was_trained_on_is_said_before_it_is_saved(tmp_path: Path) -> None:
    world = World()
    run(world, tmp_path, Cadence(2, save_interval=1, saves=True), eval_before=False)
    assert world.learnt == [(0, [0]), (1, [0])]
