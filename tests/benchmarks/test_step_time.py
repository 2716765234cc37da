"""What step_time.py says of a run: shares, medians, the run's flags; and who had how much of a device."""

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
    import json

    config = json.loads(Path(CONFIG).read_text())
    return family_of(config).settings(config)


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
