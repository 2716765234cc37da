"""The checks of chaos find what they are there to find."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import accounts, reward
from tests.chaos.plan import LOOPS, VICTIMS, Plan, Stream, draw_plan
from tests.chaos.round import CAUSE
from tests.chaos.task import BATCH, SAMPLES
from tests.chaos.victims import RunProcesses, is_alive
from vime.data.journal import Journal
from vime.data.journal_schema import FILE
from vime.observability.rollout_file import write_rollout
from vime.types import Group, Sample, SampleStatus

PLAN = Plan(1, "stub", "sync", False, 2, 0.0, ())


def group(number: int, prompt: str) -> Group:
    samples = [
        Sample(prompt=prompt, tokens=(1,), group_id=number, sample_id=i, trajectory_id=i)
        for i in range(number * SAMPLES, (number + 1) * SAMPLES)
    ]
    for sample in samples:
        sample.append_response((2, 3), (-0.5, -0.25), version=1)
        sample.status, sample.reward = SampleStatus.COMPLETED, 0.5
    return Group(number, samples, place=(0, number))


class Run:
    """A finished run's folder as chaos reads it, with as much wrong as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.task, self.dir = folder, folder / "run"
        self.num = PLAN.num_rollouts * BATCH
        prompts = [f"p{i}" for i in range(self.num + 4)]
        (folder / "train.jsonl").write_text("".join(json.dumps({"problem": p}) + "\n" for p in prompts))
        self.groups = [group(i, prompts[i]) for i in range(self.num)]
        self.records = [
            {
                "step": step,
                "train/loss": 0.5,
                "train/grad_norm": 1.0,
                "rollout/raw_reward": 0.25,
                "train/train_rollout_logprob_abs_diff": 1e-6,
                "staleness/max": 0,
            }
            for step in range(PLAN.num_rollouts)
        ]
        (self.dir / "rollouts").mkdir(parents=True)
        (self.dir / "checkpoints").mkdir()
        self.journal = Journal(self.dir / "checkpoints" / FILE)
        self.journal.taken(self.groups, 0)

    def check(self, trained: list[Group], reference: list[dict[str, float]] | None = None) -> accounts.Accounts:
        for rollout_id in range(PLAN.num_rollouts):
            part = trained[rollout_id * BATCH : (rollout_id + 1) * BATCH]
            self.journal.trained(rollout_id, part)
            write_rollout(self.dir / "rollouts" / f"rollout_{rollout_id:06d}.parquet", rollout_id, part)
        self.journal.close()
        (self.dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in self.records))
        return accounts.check(PLAN, self.task, self.dir, reference)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_in_which_all_is_well_has_nothing_to_say(run: Run) -> None:
    # The step before a kill was not saved: it is there twice, and the last time counts.
    run.records.insert(0, run.records[0] | {"train/loss": float("nan")})
    assert run.check(run.groups, run.records[1:]) == accounts.Accounts()


def test_a_prompt_that_was_passed_over_is_lost(run: Run) -> None:
    later = group(run.num, f"p{run.num}")
    run.journal.taken([later], 1)
    found = run.check([*run.groups[:3], *run.groups[4:], later])
    assert found.lost == ["p3 was passed over"], "the samples know"
    run.journal = Journal(run.dir / "checkpoints" / FILE)
    run.journal._execute("DELETE FROM lives WHERE group_id = 3")
    run.journal.close()
    assert accounts.check(PLAN, run.task, run.dir).lost[0] == "row 3 was passed over, says the journal"


def test_a_prompt_that_was_trained_on_twice_is_doubled(run: Run) -> None:
    again = group(run.num, "p0")
    again.place = (0, 0)
    run.journal.taken([again], 1)
    found = run.check([*run.groups[:-1], again])
    assert sorted(found.doubled) == ["(0, 0) was trained on 2 times, says the journal", "p0 was trained on 2 times"]


def test_a_broken_curve_is_a_fault(run: Run) -> None:
    run.records[1]["train/train_rollout_logprob_abs_diff"] = 0.01
    calm = [dict(record) for record in run.records]
    run.records[0]["train/loss"] = 0.51
    found = run.check(run.groups, calm)
    assert len(found.faults) == 2 and not found.lost and not found.doubled
    assert "0.01 nats apart" in found.faults[0] and "never killed 0.5" in found.faults[1]


def test_a_stream_trains_on_every_prompt_and_on_no_token_that_is_too_old(run: Run) -> None:
    plan = dataclasses.replace(PLAN, loop="fully_async", partial=True, stream=Stream(0, "drop", True, None))
    run.check(run.groups)
    (fault,) = accounts.check(plan, run.task, run.dir).faults
    assert fault == "rollout 1 has tokens of versions [1], not 2 to 2"
    for stream in (Stream(1, "mask", True, None), Stream(0, "correct", True, None)):
        assert accounts.check(dataclasses.replace(plan, stream=stream), run.task, run.dir) == accounts.Accounts()
    (run.dir / "rollouts" / "rollout_000000.parquet").replace(run.dir / "rollouts" / "rollout_000001.parquet")
    assert len(accounts.check(plan, run.task, run.dir).lost) == BATCH


def test_a_verdict_on_a_grader_that_died_explains_another_curve(run: Run) -> None:
    calm = [dict(record) for record in run.records]
    run.records[0] |= {"rollout/reward_crashed": 0.03, "rollout/raw_reward": 0.2}
    assert run.check(run.groups, calm).faults == []


def test_a_plan_follows_from_its_seed_and_every_kind_of_process_has_its_turn() -> None:
    plans = [draw_plan(seed, "stub") for seed in range(60)]
    assert plans == [draw_plan(seed, "stub") for seed in range(60)]
    assert {kill.victim for plan in plans for kill in plan.kills} == set(VICTIMS)
    assert {kill.signal for plan in plans for kill in plan.kills} == {"KILL", "STOP"}
    assert {plan.loop for plan in plans} == set(LOOPS)
    streams = [plan.stream for plan in plans if plan.stream is not None]
    assert len(streams) == sum(plan.loop == "fully_async" for plan in plans)
    assert {(stream.stale_groups, stream.in_flight) for stream in streams} >= {("drop", True), ("drop", False)}
    assert {plan.partial for plan in plans if plan.stream is not None} == {True, False}
    for plan in plans:
        assert list(plan.kills) == sorted(plan.kills, key=lambda kill: (kill.rollout, kill.delay_s))
        assert all(kill.rollout < plan.num_rollouts for kill in plan.kills)
    (kill,) = draw_plan(3, "vllm", victims=("router",), num_kills=1).kills
    assert kill.victim == "router"
    assert (
        str(dataclasses.replace(kill, signal="STOP", rollout=2, delay_s=0.5)) == "router SIGSTOP at rollout 2 + 0.50 s"
    )


def test_some_prompts_of_streams_take_long_to_reward_and_are_worth_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(reward.time, "sleep", slept.append)
    samples = [sample for number in range(40) for sample in group(number, f"{number}+{number}=").samples]
    shares = [reward.slow_for_some(None, sample) for sample in samples]
    assert shares == [reward.share_of_even_tokens(None, sample) for sample in samples]
    assert 0 < len(slept) < 10


@pytest.mark.parametrize(
    ("output", "has_cause"),
    [
        ("step 1\nvime: EngineDead: engine [0] of 2 is gone\n", True),
        ("vime: TrainingError: training rank 0: its process died\n", True),
        ("Traceback\nKeyError: 'x'\n", False),
        ("vime: TrainingError: no answer came:\n  the worker of rank 0 is gone\n", True),
        ("vime: KeyError: 'x'\nvime: the run's folder, with logs of its engines: runs/a\n", False),
        ("vime: interrupted; every process of the run was ended\n", False),
        ("", False),
    ],
)
def test_an_end_needs_a_line_that_says_who_died(output: str, has_cause: bool) -> None:
    assert bool(CAUSE.search(output)) is has_cause


def test_processes_are_found_by_kind_and_guards_are_not_taken_for_servers() -> None:
    server = "import os, time; os.fork(); time.sleep(600)"  # the copy has the same command line, as an engine's guard
    start = f"subprocess.Popen([sys.executable, '-c', {server!r}, 'tests.stub_engine'])"
    program = f"import subprocess, sys; p = {start}; p.wait()"
    driver = subprocess.Popen([sys.executable, "-c", program])
    processes = RunProcesses(driver.pid)
    try:
        while len(processes.seen) < 2:
            processes.note()
        engine, *others = (processes.pick(kind, random.Random(0)) for kind in ("engine", "router", "rank"))
        assert engine is not None and engine.ppid() == driver.pid
        assert others == [None, None]
        assert processes.left(0.0) == [" ".join(words)[:120] for _, words in processes.seen.values()]
    finally:
        processes.end()
        driver.wait()
    assert processes.left(30.0) == [] and not is_alive(engine)
