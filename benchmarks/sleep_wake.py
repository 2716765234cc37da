"""What it takes that trainer and engine change places on one CUDA device.

    python benchmarks/sleep_wake.py scripts/models/qwen3-0.6b/config.json --out sleep_wake.jsonl

One engine and one training rank of the shape that an HF config.json says, with random bf16 weights, take turns through
vime's own DeviceTurns and WeightSync, as a run's would: the engine sleeps, the trainer comes back and trains a step,
keeps its weights alone, the engine wakes its weights and receives them, the trainer leaves, the engine wakes its KV
cache. The first turns, in which host memory is pinned, are left out. Prints a line of JSON, seconds and bytes of each,
and appends it to the file --out. Goal for 0.6B: sleep and wake together at most 0.8 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vime.platform import get_platform  # noqa: E402

CUDA = get_platform("cuda")
os.environ.update(CUDA.trainer_environment(1, "127.0.0.1"))  # before torch

import torch  # noqa: E402

from benchmarks.common import say  # noqa: E402
from benchmarks.train_step import batch_of  # noqa: E402
from benchmarks.workload import write_model  # noqa: E402
from vime.config import Config, RolloutConfig, TrainConfig  # noqa: E402
from vime.engine.vllm.control import VllmEngine  # noqa: E402
from vime.engine.vllm.server import EngineServer  # noqa: E402
from vime.loop.turns import DeviceTurns  # noqa: E402
from vime.weight_sync import Route, make_writer  # noqa: E402
from vime.weight_sync.plan import WeightSync  # noqa: E402
from vime.weight_sync.verify import DEFAULT_TOLERANCE  # noqa: E402

KEY = "benchmark"
WARM_UP, TURNS = 2, 5
PROMPTS = [[5, 6, 7, 8], list(range(100, 140))]


def used_bytes() -> int:
    """Of the whole device."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def start_engine(model: Path, folder: Path, arguments: argparse.Namespace) -> EngineServer:
    """A server that is ready."""
    settings = {
        **CUDA.engine_arguments(2048),
        "dtype": "bfloat16",
        "enable_sleep_mode": True,
        "gpu_memory_utilization": arguments.utilization,
        "enforce_eager": arguments.enforce_eager,
    }
    server = EngineServer(
        str(model),
        arguments=settings,
        environment={**CUDA.engine_environment(), "PYTORCH_CUDA_ALLOC_CONF": ""},  # that is the trainer's
        key=KEY,
        log_path=folder / "engine.log",
    )
    server.start()
    server.wait_ready(600, lambda seconds, line: print(f"{seconds:4.0f} s  {line[:150]}", file=sys.stderr))
    return server


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one shape."""
    from vime.trainer.megatron.trainer import MegatronTrainer

    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    if arguments.num_layers:
        config["num_hidden_layers"] = arguments.num_layers
    model = folder / "model"
    parameters = write_model(model, config)
    server = start_engine(model, folder, arguments)
    engine = VllmEngine(server.url, KEY)
    settings = Config(megatron={"lr": 1e-6, "bf16": True}, rollout=RolloutConfig(), train=TrainConfig())
    writer = make_writer(Route(transport=arguments.transport, host="127.0.0.1", num_readers=1), settings)
    try:
        awake = used_bytes()
        engine.sleep(2)
        asleep = used_bytes()
        trainer = MegatronTrainer(
            settings,
            hf_path=str(model),
            platform=CUDA,
            rank=0,
            world_size=1,
            init_method=f"file://{folder / 'rendezvous'}",
            total_steps=100,
            writer=writer,
        )
        turns = DeviceTurns(trainer, [engine], trainer_leaves=not arguments.no_offload_train)
        sync = WeightSync(
            trainer,
            [engine],
            transport=arguments.transport,
            probe_prompts=PROMPTS,
            probe_interval=WARM_UP + TURNS + 1,  # at the first publish
            probe_tolerance=DEFAULT_TOLERANCE["bfloat16"],
            turns=turns,
        )
        batch = batch_of(4, 256, 64, 4, config["vocab_size"])
        rows: list[dict[str, float]] = []
        sync.publish()
        probe = dict(sync.metrics)
        probed = turns.take_metrics()
        for _ in range(WARM_UP + TURNS):
            begin = time.perf_counter()
            turns.to_training(weights_follow=True)
            back = time.perf_counter()
            trainer.train(batch)
            trained = time.perf_counter()
            sync.publish()
            end = time.perf_counter()
            rows.append(
                {
                    **turns.take_metrics(),
                    "to_training": back - begin,
                    "to_generation": end - trained,
                    "weight_sync": sync.metrics["weight_sync/seconds"],
                }
            )
        kept = rows[WARM_UP:]
        median = {name: statistics.median(row[name] for row in kept) for name in sorted(kept[0])}
        trainer.close()
    finally:
        engine.close()
        server.stop()
        writer.close()
    return {
        "model": arguments.config.parent.name,
        "num_layers": config["num_hidden_layers"],
        "parameters": parameters,
        "trainer_leaves": not arguments.no_offload_train,
        "transport": arguments.transport,
        "utilization": arguments.utilization,
        "sleep_and_wake_s": median["perf/sleep_time"] + median["perf/wake_time"],
        "median": median,
        "all": rows,
        "first_publish": {**probe, **probed},
        "engine_awake_bytes": awake,
        "engine_asleep_bytes": asleep,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an HF config.json")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--utilization", type=float, default=0.85, help="the engine's share of the device")
    parser.add_argument("--transport", default="ipc", help="of the weight sync (default: %(default)s)")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: starts sooner")
    parser.add_argument("--no-offload-train", action="store_true", help="the trainer stays on the device")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    say(result, arguments.out)


if __name__ == "__main__":
    main()
