"""Weight syncs of a real trainer and a real engine, by transport and bucket size.

    python benchmarks/weight_sync.py scripts/models/qwen3-0.6b/config.json
    python benchmarks/weight_sync.py scripts/models/qwen3-30b-a3b/config.json --num-layers 6
    python benchmarks/weight_sync.py scripts/models/qwen3-4b/config.json --engine-device 1      # two devices

A model of the shape that an HF config.json says, with random weights, is trained by Megatron-core in this process and
served by vLLM in another, as in a colocated run; with --engine-device on a device of its own. For each transport and
bucket size: one sync that is verified by a probe, then timed ones, from pause to commit, with checksums and names as
always. On two devices first what a bare NCCL broadcast between them moves. Prints a line of JSON for each, and appends
them to the file --out.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import say, write_checkpoint  # noqa: E402
from vime.config import Config, LogConfig, RolloutConfig, SyncConfig, TrainConfig  # noqa: E402
from vime.engine.vllm.control import VllmEngine  # noqa: E402
from vime.engine.vllm.server import EngineServer  # noqa: E402
from vime.engine.vllm.versions import installed_vllm_version  # noqa: E402
from vime.platform import get_platform  # noqa: E402
from vime.platform.base import Platform  # noqa: E402
from vime.weight_sync import Route, make_writer  # noqa: E402
from vime.weight_sync.plan import WeightSync  # noqa: E402
from vime.weight_sync.verify import DEFAULT_TOLERANCE  # noqa: E402

MIB = 1 << 20
BROADCAST_BYTES = 1 << 30
PROMPTS = [list(range(10, 42)), list(range(100, 110))]
MAX_MODEL_LEN = 512


def write_model(folder: Path, config: dict[str, Any], dtype: str, device: str) -> None:
    """A checkpoint of random weights, with a tokenizer of two words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    write_checkpoint(folder, config, device=device, dtype=getattr(torch, dtype))
    words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>").save_pretrained(folder)


def start_engine(arguments: argparse.Namespace, platform: Platform, folder: Path, dtype: str, key: str) -> EngineServer:
    """vLLM on the device that the trainer will be on, too, or on its own."""
    memory = {"gpu_memory_utilization": arguments.engine_memory} if platform.device_type != "cpu" else {}
    device = {} if arguments.engine_device is None else {"CUDA_VISIBLE_DEVICES": arguments.engine_device}
    server = EngineServer(
        str(folder / "model"),
        arguments={
            **platform.engine_arguments(MAX_MODEL_LEN),
            **memory,
            "dtype": dtype,
            "max_num_seqs": 16,
            "enforce_eager": True,
        },
        environment={**platform.engine_environment(), "HF_HUB_OFFLINE": "1", **device},
        key=key,
        log_path=folder / "engine.log",
    )
    server.start()
    return server


def broadcast(rank: int, meeting: str, result: str) -> None:
    """One of two ranks, each on its device: broadcasts from the first to the second."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=2)
    data = torch.zeros(BROADCAST_BYTES, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(7):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.distributed.broadcast(data, 0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if rank == 1:  # the receiver: the sender may be through before
        Path(result).write_text(str(BROADCAST_BYTES / 1e9 / statistics.median(seconds[2:])), encoding="utf-8")
    torch.distributed.destroy_process_group()


def broadcast_gb_per_second(folder: Path) -> float:
    """What NCCL moves from the first device to the second."""
    result = folder / "broadcast"
    torch.multiprocessing.spawn(broadcast, (str(folder / "broadcast-ranks"), str(result)), nprocs=2)
    return float(result.read_text(encoding="utf-8"))


def measure(
    arguments: argparse.Namespace,
    platform: Platform,
    folder: Path,
    control: VllmEngine,
    transport: str,
    bucket_mib: int,
    dtype: str,
) -> dict[str, Any]:
    """The figures of one transport and bucket size."""
    from vime.trainer.megatron.trainer import MegatronTrainer

    config = Config(
        megatron={"lr": 1e-6, "bf16": dtype == "bfloat16"},
        rollout=RolloutConfig(rollout_temperature=1.0),
        train=TrainConfig(),
        sync=SyncConfig(update_weight_transport=transport, update_weight_buffer_size=bucket_mib * MIB),
        log=LogConfig(run_dir=str(folder)),
    )
    writer = make_writer(Route(transport=transport, host="127.0.0.1", num_readers=1), config)
    trainer = MegatronTrainer(
        config,
        hf_path=str(folder / "model"),
        platform=platform,
        rank=0,
        world_size=1,
        init_method=f"file://{folder / f'rendezvous-{transport}-{bucket_mib}'}",
        total_steps=100,
        writer=writer,
    )
    sync = WeightSync(
        trainer,
        [control],
        transport=transport,
        probe_prompts=PROMPTS,
        probe_interval=1 << 30,  # at the first
        probe_tolerance=DEFAULT_TOLERANCE[dtype],
    )
    all_metrics = []
    for _ in range(1 + arguments.syncs):
        sync.publish()
        all_metrics.append(sync.metrics)
    sync.close()
    trainer.close()
    if platform.device_type == "cuda":
        torch.cuda.empty_cache()
    first, timed = all_metrics[0], all_metrics[1:]
    row: dict[str, Any] = {"model": arguments.config.parent.name, "transport": transport, "bucket_mib": bucket_mib}
    for name in timed[0]:
        values = [metrics[name] for metrics in timed]
        row[name.removeprefix("weight_sync/")] = statistics.median(values)
    row["seconds_all"] = [metrics["weight_sync/seconds"] for metrics in timed]
    row["first_seconds"] = first["weight_sync/seconds"]
    row["probe_abs_diff_mean"] = first["weight_sync/probe_abs_diff_mean"]
    row["device"] = torch.cuda.get_device_name() if platform.device_type == "cuda" else "cpu"
    row["torch"], row["vllm"] = torch.__version__, installed_vllm_version()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an HF config.json")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--transports", nargs="+", help="default: all that reach the engine")
    parser.add_argument("--bucket-mib", nargs="+", type=int, default=[128, 512, 2048])
    parser.add_argument("--engine-device", help="CUDA_VISIBLE_DEVICES of the engine; default: the trainer's device")
    parser.add_argument("--syncs", type=int, default=5, help="timed ones (default: %(default)s)")
    parser.add_argument("--engine-memory", type=float, default=0.25, help="part of the device (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    arguments = parser.parse_args()
    platform = get_platform(arguments.platform)
    dtype = "bfloat16" if platform.device_type == "cuda" else "float32"
    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    if arguments.num_layers:
        config["num_hidden_layers"] = arguments.num_layers
    unreached = "nccl" if arguments.engine_device is None else "ipc"
    transports = arguments.transports or [name for name in platform.transports if name != unreached]
    more: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.engine_device is not None:
            more = {"broadcast_gb_per_second": broadcast_gb_per_second(folder)}
        # As a training rank's process has it; read when CUDA starts, and not for the engine.
        environment = platform.trainer_environment(1, "127.0.0.1")
        os.environ.update(environment)
        write_model(folder / "model", config, dtype, platform.device_type)
        for name in environment:
            del os.environ[name]
        key = secrets.token_hex(16)
        server = start_engine(arguments, platform, folder, dtype, key)
        try:
            print(f"engine ready after {server.wait_ready(600):.0f} s", file=sys.stderr)
            control = VllmEngine(server.url, key)
            for transport in transports:
                for bucket_mib in arguments.bucket_mib:
                    row = measure(arguments, platform, folder, control, transport, bucket_mib, dtype)
                    say(row | more, arguments.out)
            control.close()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
