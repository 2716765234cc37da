"""benchmarks/algorithms: its rows are the estimators there are, its flags are accepted, its verdict misses nothing."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.algorithms import report, settings
from benchmarks.algorithms.__main__ import most_lanes, recipe_of
from benchmarks.algorithms.lanes import LaneFailed, Lanes, shares_of_cores
from vime.cli.parse import Catalogue, parse
from vime.cli.resolve import build_config
from vime.config.estimators import ESTIMATORS
from vime.config.unread import unread_settings

CONTROL = settings.CONTROL


def test_every_estimator_is_a_row() -> None:
    assert list(settings.rows(with_variants=False)) == [*ESTIMATORS, CONTROL]
    assert {*ESTIMATORS, *settings.VARIANTS, CONTROL} == set(settings.rows(with_variants=True))


@pytest.mark.parametrize("name", settings.rows(with_variants=True))
@pytest.mark.parametrize("budget", [settings.QUICK, settings.FULL], ids=["quick", "full"])
def test_the_flags_of_each_row_are_flags(name: str, budget: tuple[str, ...]) -> None:
    parsed = parse([*budget, *settings.flags_of(name)], Catalogue())
    assert not parsed.problems and "vime.train.num_steps_per_rollout" in parsed.given


@pytest.mark.parametrize("name", settings.rows(with_variants=True))
def test_every_setting_of_a_row_is_read(name: str, tmp_path: Path) -> None:
    words = ["--config", str(recipe_of(name, tmp_path)), "--eval-config", "heldout.yaml", *settings.FULL]
    parsed = parse([*words, *settings.flags_of(name)], Catalogue())
    given = {g.flag.key for g in parsed.given.values() if g.flag.owner == "vime"}
    assert "algo.advantage_estimator" in given and not list(unread_settings(build_config(parsed), given))


def write_run(folder: Path, *accuracies: float, explained: tuple[float, ...] = (), row: str = "grpo") -> report.Run:
    before, *after = accuracies
    rows: list[dict[str, float]] = [{"step": -1, "eval/heldout": before}]
    for k, accuracy in enumerate(after, 1):
        at = 10 * k - 1
        rows += [{"step": at, "eval/heldout": accuracy, "perf/step_time_without_eval_and_save": k}]
    rows += [
        {"step": 99, "perf/step_time_without_eval_and_save": 9.0, "train/critic-explained_variance": x}
        for x in explained or [float("nan")]
    ]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    run = report.read_run(row, 0, folder, 12.04)
    return run if explained else replace(run, explained_variance=[])


def test_a_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, 0.3, 0.82, 0.9, explained=(0.1, 0.25))
    assert (run.before, run.after, run.rollouts_to_goal, run.seconds, run.step_seconds) == (0.3, 0.9, 10, 12.0, 5.5)
    assert run.curve == [(0, 0.3), (10, 0.82), (20, 0.9)] and run.explained_variance == [0.1, 0.25]
    with pytest.raises(ValueError, match="1 evaluations"):
        write_run(tmp_path, 0.3)


def test_the_verdict_names_what_is_missing_and_what_did_not_learn(tmp_path: Path) -> None:
    good, flat = write_run(tmp_path, 0.3, 0.9), write_run(tmp_path, 0.3, 0.31)
    assert report.failures(["grpo"], [good], 1, 0.25) == []
    assert report.failures(["grpo", "rloo"], [good], 1, 0.25) == ["rloo: 0 of 1 runs ended"]
    (found,) = report.failures(["grpo"], [flat], 1, 0.25)
    assert found.startswith("grpo: accuracy 0.300 -> 0.310 with seed 0")
    (found,) = report.failures(["grpo"], [write_run(tmp_path, 0.3, float("nan"))], 1, 0.25)
    assert "nan" in found


def test_asynchronous_rows_must_learn_as_well_as_the_synchronous_one(tmp_path: Path) -> None:
    def runs(row: str, *after: float) -> list[report.Run]:
        return [write_run(tmp_path, 0.3, accuracy, row=row) for accuracy in after]

    told = runs("grpo", 0.7, 0.8)
    assert report.behind([*told, *runs("ahead", 0.6, 0.71)], ["ahead", "absent"], "grpo") == []
    (found,) = report.behind([*told, *runs("ahead", 0.6, 0.69)], ["ahead"], "grpo")
    assert found.startswith("ahead: accuracy 0.645 after training, and grpo has 0.750")
    assert report.behind([told[0], *runs("ahead", 0.1)], ["ahead"], "grpo") == []


def test_a_control_must_not_learn(tmp_path: Path) -> None:
    flat, risen = (write_run(tmp_path, 0.3, after, row=CONTROL) for after in (0.31, 0.9))
    assert report.failures([CONTROL], [flat], 1, 0.25) == []
    (found,) = report.failures([CONTROL], [risen], 1, 0.25)
    assert "proves nothing" in found
    (found,) = report.failures([CONTROL], [write_run(tmp_path, 0.3, float("nan"), row=CONTROL)], 1, 0.25)
    assert "nan" in found


def test_a_critic_must_come_to_know_something(tmp_path: Path) -> None:
    knows = write_run(tmp_path, 0.3, 0.9, explained=(-0.5, -0.1, 0.0, 0.2))
    knows_nothing = write_run(tmp_path, 0.3, 0.9, explained=(0.5, 0.1, 0.0, -0.2))
    assert report.failures(["grpo"], [knows], 1, 0.25, critics=True) == []
    (found,) = report.failures(["grpo"], [knows_nothing], 1, 0.25, critics=True)
    assert "critic" in found
    assert report.failures(["grpo"], [knows_nothing], 1, 0.25) == [], "a brief run is too short for it"


def test_the_table_has_a_line_for_each_row(tmp_path: Path) -> None:
    run = write_run(tmp_path, 0.3, 0.9)
    lines = report.table(["grpo", "rloo"], [run, replace(run, seed=1, curve=[(0, 0.3), (10, 0.7)])]).splitlines()
    assert lines[2:] == [
        "| grpo | 2 | 0.300 | 0.800 (0.700 to 0.900) | 10 (1 of 2) | 5.0 | 12 |",
        "| rloo | 0 | | | | | |",
    ]


def test_results_outlive_a_stop_and_are_kept_where_nothing_changed(tmp_path: Path) -> None:
    warm, out = tmp_path / "warm", tmp_path / "out"
    warm.mkdir(), out.mkdir()
    (warm / "model.safetensors").write_bytes(b"one")
    run = write_run(tmp_path / "run", 0.3, 0.9)
    report.Record(out, resume=False, note="busy", lanes=1).add(run, ["--lr", "1"], warm)
    again = report.Record(out, resume=True, note="", lanes=1)
    assert again.runs_of(["grpo"], [0]) == [run]
    assert again.keeps("grpo", 0, ["--lr", "1"], warm)
    assert not again.keeps("grpo", 1, ["--lr", "1"], warm) and again.runs_of(["grpo"], [0]) == [run]
    again.add(replace(run, seed=1), ["--lr", "1"], warm)
    again.add(replace(run, seed=1, seconds=7.0), ["--lr", "1"], warm)
    kept = json.loads((out / "results.json").read_text())
    assert [(r["seed"], r["seconds"]) for r in kept["runs"]] == [(0, 12.0), (1, 7.0)] and kept["versions"]["torch"]
    (warm / "model.safetensors").write_bytes(b"another")
    assert not again.keeps("grpo", 0, ["--lr", "1"], warm)
    assert not again.keeps("grpo", 1, ["--lr", "2"], warm)
    assert again.runs_of(["grpo"], [0, 1]) == [], "if the new run fails, the old one must not pass for it"
    assert report.Record(out, resume=False, note="", lanes=1).runs_of(["grpo"], [0, 1]) == []


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path, 0.3, 0.9)
    for names, runs in ((["grpo", "rloo"], [run, replace(run, seed=1)]), (["grpo"], [])):
        report.plot(names, runs, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_lanes_share_the_cores() -> None:
    assert [most_lanes(cores, gib << 30) for cores, gib in ((2, 24), (16, 500), (1, 24), (2, 8), (2, 4))] == [
        2,
        2,
        1,
        1,
        1,
    ]
    assert shares_of_cores([0, 1], 2) == [[0], [1]]
    assert shares_of_cores([3, 4, 5, 6, 7], 2) == [[3, 4], [5, 6]]
    assert shares_of_cores([0], 2) == [[0], [0]]


class QuickLanes(Lanes):
    """Lanes whose engine is a process that only prints."""

    says = "print('ready')"

    def _engine_command(self, k: int) -> tuple[list[str], list[str]]:
        return [sys.executable, "-u", "-c", f"{self.says}; import time; time.sleep(600)"], [f"engine {k}"]


def test_jobs_are_done_on_the_cores_of_a_lane_and_all_ends(tmp_path: Path) -> None:
    seen: list[tuple[str, set[int]]] = []
    with QuickLanes(2, tmp_path, tmp_path) as lanes:
        lanes.do([lambda engine: seen.append((engine[0], os.sched_getaffinity(0)))] * 5)
    assert len(seen) == 5 and {name for name, _ in seen} <= {"engine 0", "engine 1"}
    assert all(cores == set(shares_of_cores(sorted(os.sched_getaffinity(0)), 2)[int(name[-1])]) for name, cores in seen)


def test_a_job_that_fails_ends_the_lanes(tmp_path: Path) -> None:
    def fails(engine: object) -> None:
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"), QuickLanes(2, tmp_path, tmp_path) as lanes:
        lanes.do([fails] * 3)


def test_an_engine_that_does_not_start_is_said(tmp_path: Path) -> None:
    class Broken(QuickLanes):
        says = "raise SystemExit(3)"

    with pytest.raises(LaneFailed, match=r"engine_\d\.log"), Broken(2, tmp_path, tmp_path) as lanes:
        lanes.do([lambda engine: None])
