"""A run on an engine that `vime engine` serves: it brings the weights, and leaves the engine running."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.processes import free_port, stop_process

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_two_runs_share_an_engine_that_outlives_them(
    run_train: Callable[..., str], grpo_flags: list[str], task: Path, tmp_path: Path
) -> None:
    address, key_file = f"127.0.0.1:{free_port()}", tmp_path / "key"
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "vime.cli.main", "engine", "--hf-checkpoint", str(task / "model")),
            *("--platform", "cpu", "--port", address.rpartition(":")[2], "--key-file", str(key_file)),
            *("--log-file", str(tmp_path / "engine.log")),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        lines = [server.stdout.readline().decode() for _ in range(2)]
        assert f"ready; give the trainer --rollout-external-engine-addrs {address}" in lines[1], lines
        assert key_file.stat().st_mode & 0o777 == 0o600
        for transport, told in (("auto", "weights travel by shm"), ("gloo", "weights travel by gloo")):
            folder = tmp_path / transport
            output = run_train(
                *grpo_flags,
                *("--rollout-external-engine-addrs", address, "--rollout-external-engine-key-file", str(key_file)),
                *("--num-rollout", "2", "--skip-eval-before-train", "--update-weight-transport", transport),
                *("--run-dir", str(folder)),
            )
            assert told in output
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            assert rows[-1]["step"] == 1
            assert rows[-1]["train/train_rollout_logprob_abs_diff"] <= 1e-5
        engine = VllmEngine(f"http://{address}", key_file.read_text().strip())
        (completion,) = engine.probe([[5, 6, 7]], 4).completions
        assert len(completion.token_ids) == 4
        engine.close()
    finally:
        stop_process(server, 20.0)
    assert server.returncode == 0
