"""What step_time.py says of a run: shares, medians, the run's flags; and who had how much of a device."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import step_time
from benchmarks.device_watch import DeviceWatch
from vime.models import family_of

CONFIG = "scripts/models/qwen3-0.6b/config.json"
LIMITS = {"matmul_tflops": 800.0, "tokens_per_s": 30_000.0}


def step(seconds: float, **more: float) -> dict[str, float]:
    return {
        "perf/step_time": seconds,
        "perf/actor_train_time": 5.0,
        "perf/train_time": 5.5,
        "rollout/num_tokens": 524_288.0,
        "weight_sync/seconds": 0.5,
        "train/train_rollout_logprob_abs_diff": 0.005,
        **more,
    }


def qwen() -> Any:
    config = json.loads(Path(CONFIG).read_text())
    return family_of(config).settings(config)


@pytest.mark.slow
@pytest.mark.engine
def test_a_small_model_goes_the_whole_way_on_the_cpu(tmp_path: Path) -> None:
    config = json.loads(Path(CONFIG).read_text())
    config |= {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ["--prompts", "4", "--samples", "4", "--prompt-len", "16", "--response-len", "24", "--steps", "2"]
    flags = ["--platform", "cpu", "--layout", "separate", "--work", str(tmp_path / "w"), "--out", str(tmp_path / "o")]
    command = [sys.executable, "benchmarks/step_time.py", str(tmp_path / "config.json"), *sizes, *flags]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    result = json.loads((tmp_path / "o").read_text())
    assert result["rollout_tokens_per_s"] == pytest.approx(4 * 4 * 24 / result["rollout_s"])
    assert result["steps"] == 1 and not result["ended_early"] and 0 < result["other_share"] < 1
    assert result["limits"]["tokens_per_s"] > 0 and result["log_prob_abs_diff"] < 0.1


def test_shares_of_a_colocated_step() -> None:
    _, options = step_time.parse([CONFIG])
    steps = [step(s, **{"perf/rollout_time": 20.0}) for s in (27.0, 26.0, 25.5)]
    result = step_time.figures(steps, LIMITS, qwen(), options)
    assert result["step_s"] == 26.0
    assert result["other_share"] == pytest.approx((26.0 - 20.0 - 5.0 - 0.5) / 26.0)
    assert result["of_offline_vllm"] == pytest.approx(524_288 / 20.0 / 30_000)
    # 512 samples of 1,280 tokens: 6 operations a parameter and token are 0.44 billion x 655,360 x 6, and attention
    assert 0.4 < result["mfu"] < 0.8


def test_one_step_ahead_is_compared_with_the_longer_side() -> None:
    _, options = step_time.parse([CONFIG, "--layout", "ahead"])
    result = step_time.figures([step(21.0, **{"perf/rollout_s": 20.0})], LIMITS, qwen(), options)
    assert result["of_the_longer"] == pytest.approx(21 / 20)
    assert "other_share" not in result


def test_words_behind_two_dashes_are_flags_of_the_run() -> None:
    _, options = step_time.parse([CONFIG, "--prompts", "4", "--", "--no-offload-train"])
    flags = step_time.run_flags(Path("w"), options)
    assert flags[-1] == "--no-offload-train" and flags[flags.index("--vllm-max-num-seqs") + 1] == "32"


def test_a_run_that_is_interrupted_is_ended_and_what_it_did_counts(tmp_path: Path) -> None:
    run = tmp_path / "run.py"
    run.write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('stopping', flush=True)\n"
    )
    program = f"""
import signal, sys
from benchmarks import step_time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a worker of pytest-xdist
print(step_time.run_for([sys.executable, {str(run)!r}], timeout_s=60))
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["stopping", "False"], done.stderr
    assert time.monotonic() - begin < 55


class Nvml:
    """A device whose processes take turns."""

    def __init__(self) -> None:
        self.processes: list[SimpleNamespace] = []

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(used=10 + sum(p.usedGpuMemory or 0 for p in self.processes))

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return self.processes


def test_the_most_that_each_process_had(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, names = Nvml(), {1: "python3", 2: "ray::TrainerWorker"}
    monkeypatch.setattr("benchmarks.device_watch.process_name", names.__getitem__)
    watch = DeviceWatch(0, nvml)
    with watch:
        for engine, trainer in ((50, 0), (80, 5), (2, 30)):
            nvml.processes = [SimpleNamespace(pid=p, usedGpuMemory=b) for p, b in ((1, engine), (2, trainer))]
            names[1] = "VLLM::EngineCore"  # it renames itself
            watch.sample()
    assert watch.before_bytes == 10 and watch.peak_bytes == 95
    assert watch.peak_by_process == {"VLLM::EngineCore": 80, "ray::TrainerWorker": 30}
    assert watch.engine_bytes() == 80
