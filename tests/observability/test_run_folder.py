import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml

from vime.config import Config
from vime.observability.run_folder import RunFolder, plain_settings, read_metrics, versions
from vime.types import Group, Sample, SampleStatus


def test_the_resolved_settings_are_written_without_secrets(tmp_path):
    config = Config(vllm={"api_key": "sk-very-secret", "hf_token": "hf_x", "max_num_batched_tokens": 512})
    config = replace(config, rollout=replace(config.rollout, rollout_stop_token_ids=[1, 2]))
    text = RunFolder(tmp_path / "run").write_config(config).read_text("utf-8")
    assert "secret" not in text and "hf_x" not in text
    saved = yaml.safe_load(text)
    assert saved["vllm"]["max_num_batched_tokens"] == 512
    assert saved["rollout"]["rollout_stop_token_ids"] == [1, 2]
    assert saved["data"]["input_key"] == "input", "a key that is no secret stays"


def test_odd_values_become_plain():
    assert plain_settings({"a": (1, None), "b": np.float32(2), "c": SampleStatus.FAILED, "password": ""}) == {
        "a": [1, None],
        "b": "2.0",
        "c": "failed",
        "password": "",
    }


def test_versions_name_software_and_machine(tmp_path):
    saved = json.loads(RunFolder(tmp_path).write_versions().read_text("utf-8"))
    assert saved == versions()
    assert {"torch", "megatron-core", "ray", "vllm-router", "transformers"} <= set(saved["packages"])
    assert saved["python"].startswith("3.") and saved["cpu_model"] and saved["vime"]


def groups():
    said = Sample(
        prompt="1+1=",
        tokens=(1, 2),
        group_id=4,
        sample_id=8,
        trajectory_id=8,
        response="2\ud83d",
        label="2",
        reward=1.0,
        status=SampleStatus.COMPLETED,
        metadata={"level": 3, "odd": {1, 2}},
    )
    said.append_response((5, 6), (-0.25, -0.5), version=3)
    said.append_response((7,), trainable=False)
    chat = Sample(prompt=[{"role": "user", "content": "hi"}], group_id=4, sample_id=9, reward={"a": 1.0}, label=[1])
    return [Group(4, [said, chat])]


def test_pandas_reads_a_rollout(tmp_path):
    frame = pd.read_parquet(RunFolder(tmp_path).write_rollout(12, groups()))
    assert (tmp_path / "rollouts" / "rollout_000012.parquet").exists()
    first, second = frame.iloc[0], frame.iloc[1]
    assert frame.rollout_id.tolist() == [12, 12] and frame.sample_id.tolist() == [8, 9]
    assert (first.prompt, first.label, first.reward) == ("1+1=", "2", 1.0)
    assert json.loads(first.response) == "2\ud83d" and list(first.json) == ["response"]
    assert first.status == "completed" and second.status == "pending"
    assert first.tokens.tolist() == [1, 2, 5, 6, 7] and first.loss_mask.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(first.rollout_log_probs, np.array([-0.25, -0.5, np.nan], np.float32))
    assert list(first.weight_versions) == [{"version": 3, "start": 0, "end": 2}]
    assert json.loads(first.metadata)["level"] == 3
    assert json.loads(second.prompt) == [{"role": "user", "content": "hi"}]
    assert np.isnan(second.reward) and json.loads(second.rewards) == {"a": 1.0}


def test_a_failed_write_leaves_no_partial_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_rollout(0, groups())
    before = folder.rollout_path(0).read_bytes()
    bad = groups()
    bad[0].samples[0].reward = "not a number"
    with pytest.raises((ValueError, TypeError)):
        folder.write_rollout(0, bad)
    assert folder.rollout_path(0).read_bytes() == before
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["rollout_000000.parquet"]


def test_a_refused_run_leaves_the_settings_of_the_run_before(tmp_path):
    before = RunFolder(tmp_path / "run")
    before.write_config({"lr": 1.0})
    before.write_versions()
    before.metrics_path.write_text("{}\n")
    refused = RunFolder(tmp_path / "run")
    refused.write_config({"lr": 2.0})
    refused.write_versions()
    assert not refused.remove_unused()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == {"lr": 1.0}
    begun = RunFolder(tmp_path / "run")
    begun.write_config({"lr": 2.0})
    begun.metrics_path.write_text("{}\n{}\n")
    assert not begun.remove_unused()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == {"lr": 2.0}, "it has trained with these"


def test_metrics_are_those_of_the_last_time_and_what_is_none_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "a": 1.0, "b": 2.0}\n{"step": 0, "a": 0.5}\n{"step": 1, "eval/x": 3.0}\ngarbage{\n[1]\n{"a": 1}\n'
        '{"step": 0, "a": 0.7}\n{"step": 2, "tor'
    )
    assert read_metrics(path) == {0: {"step": 0, "a": 0.7}, 1: {"step": 1, "a": 1.0, "b": 2.0, "eval/x": 3.0}}
    assert list(read_metrics(path)) == [0, 1]


@pytest.mark.parametrize("line", ["garbage{", "[1]", "3", '{"a": 1}', '{"step": "x"}'])
def test_a_line_that_is_no_metrics_stops_no_resume(tmp_path, line):
    folder = RunFolder(tmp_path / "run")
    folder.metrics_path.write_text('{"step": 0}\n{"step": 1}\n' + line + "\n")
    assert [step for step in range(4) if RunFolder(tmp_path / "run").lacks_row(step)] == [2]


def test_a_run_that_ended_between_a_save_and_the_metrics_lacks_their_row(tmp_path):
    assert not RunFolder(tmp_path / "run").lacks_row(0), "a new folder has nothing to go on with"
    folder = RunFolder(tmp_path / "run")
    assert not folder.lacks_row(0), "no run has written there"
    folder.metrics_path.write_text("")
    assert folder.lacks_row(0) and not folder.lacks_row(1)
    folder.metrics_path.write_text('{"step": -1}\n{"step": 0}\n{"step": 1}\n{"step": 2, "tor')
    assert [step for step in range(5) if folder.lacks_row(step)] == [2]
