"""What is built from the settings to measure and to write."""

import json
from dataclasses import replace

import pytest

from vime.config import CheckpointConfig, Config, LogConfig
from vime.observability.run_folder import RunFolder
from vime.orchestration.telemetry import make_meter, make_tracer, make_writer


def at(name):
    return {"name": name, "start_s": 0.0, "end_s": 1.0}


def test_spans_of_several_sources_share_the_track_of_their_engine(tmp_path):
    folder = RunFolder(tmp_path)
    config = Config(log=LogConfig(trace=True, trace_max_mib=1))
    sources = [lambda: [[at("commit")], [at("commit")]], lambda: [], lambda: [[at("rollout")]]]
    tracer = make_tracer(config, folder, 7, trainer=None, critic=None, engines=sources)
    tracer.step([at("rollout")])
    tracer.close()
    events = json.loads((tmp_path / "trace_000007.json").read_text())
    tracks = sorted((e["tid"], e["name"]) for e in events if e["ph"] == "X" and e["pid"] == 4)
    assert tracks == [(1, "commit"), (1, "rollout"), (101, "commit")]
    assert make_tracer(Config(), folder, 0, trainer=None, critic=None, engines=[]) is None


def test_a_run_without_engines_has_no_meter():
    assert make_meter(Config(), None, None) is None


def test_a_resumed_run_writes_to_the_wandb_run_of_its_checkpoints(tmp_path):
    pytest.importorskip("wandb", reason="the optional extra wandb")
    log = LogConfig(use_wandb=True, wandb_mode="offline")
    begun = Config(log=log, checkpoint=CheckpointConfig(save=str(tmp_path / "ck")))
    resumed = replace(begun, checkpoint=CheckpointConfig(load=str(tmp_path / "ck")))
    for name, config in (("a", begun), ("b", resumed), ("c", begun)):
        make_writer(config, RunFolder(tmp_path / name)).close()
    ids = [json.loads((tmp_path / name / "wandb.json").read_text())["run_id"] for name in "abc"]
    assert ids[0] == ids[1] != ids[2], "a new run is another one, though its --save folder has been used before"
