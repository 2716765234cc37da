"""An engine of two devices (on a CPU, processes): every worker gets, checks and loads what it needs of each sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.weight_sync.hf_trainer import HfTrainer
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.platform.cpu import CpuPlatform
from vime.weight_sync import gloo, shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = [[10, 20, 30, 40], list(range(50, 90))]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def served(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., EngineServer],
    tiny_qwen3: Path,
    tiny_qwen3_moe: Path,
    run_key: str,
) -> Iterator[tuple[VllmEngine, Path]]:
    model = tiny_qwen3 if request.param == "qwen3" else tiny_qwen3_moe
    platform = CpuPlatform()
    arguments = {**platform.engine_arguments(512, num_devices=2), "tensor_parallel_size": 2}
    server = start_engine(model, environment=platform.engine_environment(num_devices=2), **arguments)
    control = VllmEngine(server.url, run_key)
    yield control, model
    control.close()
    server.stop()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_two_devices_compute_with_the_weights_of_the_sync(
    served: tuple[VllmEngine, Path], transport: str, tmp_path: Path
) -> None:
    control, model = served
    assert len(control.identity()) == 2
    writer = shm.Writer() if transport == "shm" else gloo.Writer("127.0.0.1", num_readers=2, timeout_s=60.0)
    trainer = HfTrainer(model, writer)
    trainer.perturb(seed=len(transport))
    sync = WeightSync(
        trainer,  # type: ignore[arg-type]
        [control],
        transport=transport,
        probe_prompts=PROMPTS,
        probe_interval=1,
        probe_tolerance=ProbeTolerance(1e-4),
    )
    try:
        assert sync.publish() == 1
    finally:
        sync.close()
        writer.close()
    assert sync.metrics["weight_sync/probe_abs_diff_max"] < 1e-4
