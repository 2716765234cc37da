"""Traces of the chosen rollouts and ranks; memory snapshots by the calls that CUDA's recorder takes."""

import gzip
import json

import pytest
import torch

from vime.config import DebugConfig, LogConfig
from vime.trainer.megatron.profiling import Profiler

LENGTHS = [9, 4]


def test_traces_of_the_chosen_rollouts_open_as_chrome_traces(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    debug = DebugConfig(profile=True, use_pytorch_profiler=True, profile_step_start=7, profile_step_end=8)
    trainer = make_trainer(folder, debug=debug, log=LogConfig(run_dir=str(tmp_path / "run")))
    trainer.train(make_batch(LENGTHS))  # rollout 7
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert path.name == "rank_0_rollout_000007.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = {event.get("name", "") for event in trace["traceEvents"] if event.get("ph") == "X"}
    assert any(name.startswith("autograd::engine") for name in names) and "aten::mm" in names


@pytest.mark.parametrize(("rank", "rollout_id"), [(0, 2), (0, 5), (1, 3)])
def test_other_rollouts_and_ranks_are_left_alone(tmp_path, rank, rollout_id):
    debug = DebugConfig(profile=True, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5)
    with Profiler(debug, tmp_path, rank=rank, device_type="cpu").rollout(rollout_id):
        torch.ones(2)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def recorder(monkeypatch):
    """What is asked of CUDA's memory recorder, which a machine without CUDA lacks."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **k: calls.append(k.get("enabled", "all")))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path.rsplit("/", 1)[1]))
    return calls


def test_memory_is_recorded_for_some_rollouts_and_then_written_once(tmp_path, recorder):
    debug = DebugConfig(record_memory_history=True, memory_snapshot_num_steps=2)
    profiler = Profiler(debug, tmp_path, rank=0, device_type="cuda")
    for rollout_id in (4, 5, 6):
        with profiler.rollout(rollout_id):
            pass
    assert recorder == ["all", "rank_0_rollout_000005.pickle", None]


def test_a_run_out_of_memory_writes_its_snapshot_and_goes_on_to_fail(tmp_path, recorder):
    debug = DebugConfig(record_memory_history=True, memory_snapshot_num_steps=9)
    profiler = Profiler(debug, tmp_path, rank=0, device_type="cuda")
    with pytest.raises(torch.OutOfMemoryError), profiler.rollout(3):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert recorder == ["all", "rank_0_out_of_memory_rollout_000003.pickle", None]


def test_an_nsys_range_is_closed_also_when_training_fails(tmp_path, monkeypatch):
    calls = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    profiler = Profiler(DebugConfig(profile=True, profile_step_start=0), tmp_path, rank=0, device_type="cuda")
    with pytest.raises(ValueError, match="bad"), profiler.rollout(0):
        raise ValueError("bad")
    assert calls == ["start", "synchronize", "stop"]
