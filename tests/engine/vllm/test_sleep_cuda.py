"""Engines on one CUDA device sleep and wake: what they compute, and the memory they take, is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import RUN_KEY, save_tiny_model
from tests.weight_sync.hf_trainer import HfTrainer
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.platform import get_platform
from vime.protocols import ProbeResult
from vime.weight_sync import shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import DEFAULT_TOLERANCE, compare_probe, probe_sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [list(range(10, 30)), [7, 8, 9]]
MIB = 1 << 20
KINDS = {"qwen3": False, "qwen3_moe": True, "glm4_moe": True}  # whether CUDA graphs are off, which takes less time


class Turns:
    """Stands for vime.loop.turns around a trainer that is never on the device."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    def to_sync(self) -> None:
        self.engine.wake(["weights"])

    def to_generation(self) -> None:
        self.engine.wake(["kv_cache"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, EngineServer]]]:
    """One server of each kind, all started at once."""
    root, platform = tmp_path_factory.mktemp("sleep"), get_platform("cuda")
    started = {}
    for kind, eager in KINDS.items():
        folder = save_tiny_model(root / kind, kind, dtype="bfloat16")
        arguments = {
            **platform.engine_arguments(256),
            "dtype": "bfloat16",
            "enable_sleep_mode": True,
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 4 << 30,
            "enforce_eager": eager,
            "max_num_seqs": 8,
        }
        started[kind] = (
            folder,
            EngineServer(
                str(folder),
                arguments=arguments,
                environment=platform.engine_environment(),
                key=RUN_KEY,
                log_path=root / f"{kind}.log",
            ),
        )
    try:
        for _, server in started.values():
            server.start()
        for _, server in started.values():
            server.wait_ready(300)
        yield started
    finally:
        for _, server in started.values():
            server.stop()


def used_bytes() -> int:
    """Of the whole device, which nobody else may use meanwhile."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def difference(one: ProbeResult, other: ProbeResult) -> float:
    """Largest difference between log-probs; infinite where the tokens differ."""
    pairs = list(zip(one.completions, other.completions, strict=True))
    if any(a.token_ids != b.token_ids for a, b in pairs):
        return float("inf")
    return max(float(np.abs(np.subtract(a.log_probs, b.log_probs)).max()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_sleep_changes_neither_log_probs_nor_memory(servers: dict[str, tuple[Path, EngineServer]], kind: str) -> None:
    """At level 2 what no sync brings (rotary tables, an expert's map) must survive; the first sync brings the same
    weights as the engine started from, the later ones others."""
    folder, server = servers[kind]
    engine = VllmEngine(server.url, RUN_KEY)
    writer = shm.Writer()
    trainer = HfTrainer(folder, writer, dtype=torch.bfloat16)
    sync = WeightSync(
        trainer,  # type: ignore[arg-type]
        [engine],
        transport="shm",
        probe_prompts=PROMPTS,
        probe_interval=0,
        probe_tolerance=DEFAULT_TOLERANCE["bfloat16"],
        turns=Turns(engine),  # type: ignore[arg-type]
    )
    figures: dict[str, list[Any]] = {"alone": [], "synced": [], "from_hf": [], "awake": [], "asleep": []}
    before = engine.probe(PROMPTS, 32)
    for _ in range(3):  # level 1 without a sync: the weights come back from the host
        engine.sleep(1)
        engine.wake(["weights"])
        engine.wake(["kv_cache"])
        figures["alone"].append(difference(before, engine.probe(PROMPTS, 32)))
    for level in (1, 2):
        for number in range(3):
            figures["awake"].append(used_bytes() / MIB)
            engine.sleep(level)
            figures["asleep"].append(used_bytes() / MIB)
            sync.publish()
            probe = engine.probe(PROMPTS, 32)
            if number == 0:
                figures["synced"].append(difference(before, probe))
            scores = trainer.score(probe_sequences(probe))
            figures["from_hf"].append(compare_probe(probe, scores).mean)
            trainer.perturb(10 * level + number, scale=0.01)
            sync_again_awake(sync, engine)
        trainer = HfTrainer(folder, writer, dtype=torch.bfloat16)
        sync._trainer = trainer  # type: ignore[assignment]
    figures["awake"].append(used_bytes() / MIB)
    print({kind: figures})
    sync.close()
    writer.close()
    engine.close()
    assert max(*figures["alone"], *figures["synced"]) < 1e-3
    assert max(figures["from_hf"]) < DEFAULT_TOLERANCE["bfloat16"].bound
    assert max(figures["awake"]) - figures["awake"][0] < 64
    assert figures["awake"][0] - max(figures["asleep"]) > 4000  # the KV cache at least
    assert max(figures["asleep"]) - min(figures["asleep"]) < 64


def sync_again_awake(sync: WeightSync, engine: VllmEngine) -> None:
    """Other weights, without sleep, so that the next sleep has something to keep or to lose."""
    turns, sync._turns = sync._turns, None
    sync.publish()
    sync._turns = turns


def test_an_engine_that_sleeps_generates_again_only_when_all_of_it_is_awake(
    servers: dict[str, tuple[Path, EngineServer]],
) -> None:
    engine = VllmEngine(servers["qwen3_moe"][1].url, RUN_KEY)
    engine.sleep(1)
    assert engine._get("/is_paused") == {"is_paused": True}
    engine.wake(["weights"])
    assert engine._get("/is_sleeping") == {"is_sleeping": True}
    engine.wake(["kv_cache"])
    assert len(engine.probe(PROMPTS, 4).completions) == len(PROMPTS)
    engine.close()
