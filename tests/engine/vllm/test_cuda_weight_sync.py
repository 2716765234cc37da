"""Weight syncs from one CUDA process to the engine's: over the device they share (ipc), and to other devices (nccl)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import RUN_KEY, save_tiny_model
from tests.weight_sync.hf_trainer import HfTrainer, wrong_checksum_of
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.errors import WeightSyncError
from vime.platform.cuda import CudaPlatform
from vime.weight_sync import ipc, nccl
from vime.weight_sync.broadcast import Meeting, bound_store
from vime.weight_sync.device_memory import CudaMemory
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import DEFAULT_TOLERANCE
from vime.wire import BucketMessage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[10, 20, 30, 40], list(range(50, 90))]
VICTIM = "model.layers.1.self_attn.v_proj.weight"
BUFFER_BYTES = 100_000
SPARE_BYTES = 64 << 20  # what allocators may keep for themselves


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("cuda") / request.param, request.param, dtype="bfloat16", head_dim=64
    )


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineServer]]:
    """A function (model, devices) that starts an engine there; it sleeps and wakes."""
    servers: list[EngineServer] = []

    def start(model: Path, devices: list[int]) -> EngineServer:
        for server in servers:  # one at a time
            server.stop()
        platform = CudaPlatform()
        # As this process numbers them, which may see only some itself.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        server = EngineServer(
            str(model),
            arguments={
                **platform.engine_arguments(512, len(devices)),
                "dtype": "bfloat16",
                "tensor_parallel_size": len(devices),
                "max_num_seqs": 16,
                "gpu_memory_utilization": 0.2,
                "kv_cache_memory_bytes": 4 << 30,  # not measured, which others on the device would disturb
                "enforce_eager": True,
                "enable_sleep_mode": True,
                "seed": 0,
            },
            environment={
                **platform.engine_environment(len(devices)),
                "CUDA_VISIBLE_DEVICES": ",".join(visible[device] for device in devices),
                "HF_HUB_OFFLINE": "1",
            },
            key=RUN_KEY,
            log_path=tmp_path_factory.mktemp("engine") / "engine.log",
        )
        servers.append(server)
        server.start()
        server.wait_ready(140)
        return server

    yield start
    for server in servers:
        server.stop()


def make_sync(trainer: HfTrainer, control: VllmEngine, transport: str) -> WeightSync:
    return WeightSync(
        trainer,  # type: ignore[arg-type]
        [control],
        transport=transport,
        probe_prompts=PROMPTS,
        probe_interval=1,
        probe_tolerance=DEFAULT_TOLERANCE["bfloat16"],
    )


@pytest.fixture(scope="module")
def colocated(serve: Callable[..., EngineServer], model: Path) -> Iterator[tuple[VllmEngine, HfTrainer, ipc.Writer]]:
    control = VllmEngine(serve(model, [0]).url, RUN_KEY)
    writer = ipc.Writer(BUFFER_BYTES)
    yield control, HfTrainer(model, writer, BUFFER_BYTES, torch.bfloat16, "cuda"), writer
    control.close()
    writer.close()


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_syncs_over_the_shared_device_are_verified_and_take_no_memory(
    colocated: tuple[VllmEngine, HfTrainer, ipc.Writer],
) -> None:
    control, trainer, _ = colocated
    sync = make_sync(trainer, control, "ipc")
    free = []
    for seed in range(1, 6):
        trainer.perturb(seed)
        assert sync.publish() == seed  # the probe is part of it
        free.append(free_bytes())
        assert sync.metrics["weight_sync/buckets"] > 2
    assert free[-1] > free[1] - SPARE_BYTES, free
    sync.close()


def test_a_wrong_tensor_is_caught_and_the_next_sync_is_right_again(
    colocated: tuple[VllmEngine, HfTrainer, ipc.Writer],
) -> None:
    control, trainer, writer = colocated
    sync = make_sync(trainer, control, "ipc")

    def corrupt(bucket: BucketMessage) -> BucketMessage:
        for spec in bucket.tensors:
            if spec.name == VICTIM:
                data = writer._buffers[bucket.index % 2].memory.data
                data[spec.offset + spec.num_bytes // 2] ^= 1
                torch.cuda.synchronize()
        return bucket

    trainer.tamper = corrupt
    with pytest.raises(WeightSyncError, match=f"checksum differs for {VICTIM}"):
        sync.publish()
    with pytest.raises(WeightSyncError, match="may not serve"):
        control.resume()
    trainer.tamper = lambda bucket: bucket
    trainer.edit = lambda stream: ((n, t) for n, t in stream if n != VICTIM)
    with pytest.raises(WeightSyncError, match=f"missing: {VICTIM}"):
        sync.publish()
    trainer.edit = lambda stream: stream
    assert sync.publish() == 1
    sync.close()


def test_an_engine_that_dropped_its_weights_gets_them_back_from_a_sync(
    colocated: tuple[VllmEngine, HfTrainer, ipc.Writer],
) -> None:
    """Level 2: weights first, then the sync, then the KV cache."""
    control, trainer, _ = colocated
    sync = make_sync(trainer, control, "ipc")
    sync.publish()
    awake = free_bytes()
    trainer.perturb(7)
    control.pause("abort")
    control.sleep(2)
    assert free_bytes() > awake + (1 << 30)
    control.wake(["weights"])
    control.pause("keep")
    # The first half of `publish`; the probe needs the KV cache.
    control.begin_weights(2, "ipc", trainer.weight_names())
    for bucket in trainer.weights(2):
        control.receive(bucket)
    control.commit(2)
    control.wake(["kv_cache"])
    control.resume()
    assert sync.publish() == 2, "verified against the trainer"
    sync.close()


def test_device_memory_is_opened_by_another_process_and_freed() -> None:
    program = (
        "import sys, torch; from vime.weight_sync.device_memory import CudaMemory; m = CudaMemory();"
        "handle, size = sys.argv[1], int(sys.argv[2]); shared = m.open(handle, size);"
        "print(m.device_id(), int(shared.data.long().sum())); shared.data[:10] = 3; torch.cuda.synchronize();"
        "shared.release()"
    )
    memory = CudaMemory()
    before = free_bytes()
    shared = memory.allocate(100 << 20)
    assert before - free_bytes() >= 100 << 20
    shared.data.fill_(2)
    memory.synchronize()
    done = subprocess.run(
        [sys.executable, "-c", program, shared.handle, str(shared.data.numel())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [memory.device_id(), str(2 * shared.data.numel())]
    assert shared.data[:11].tolist() == [3] * 10 + [2]
    shared.release()
    assert free_bytes() > before - SPARE_BYTES
    with pytest.raises(WeightSyncError, match="lower --update-weight-buffer-size"):
        memory.allocate(1 << 45)


def test_an_nccl_group_is_made_used_and_left() -> None:
    """Of one member: the library's calls as they are, on a machine with one device."""
    meeting = Meeting(host="127.0.0.1", port=0, group="", held="", num_readers=0, timeout_s=60.0)
    link = nccl.NcclLink()
    store, _ = bound_store("127.0.0.1", meeting.timeout)
    data = torch.arange(100, dtype=torch.uint8, device=link.device(None))
    for name in ("first", "second"):
        group = link.join(store, dataclasses.replace(meeting, group=name), 0, data.device)
        for _ in range(2):
            link.broadcast(group, data, meeting.timeout)
        link.leave(group)
    assert data.tolist() == list(range(100))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_syncs_to_other_devices_are_verified_and_a_wrong_tensor_is_caught(
    serve: Callable[..., EngineServer], model: Path, num_devices: int
) -> None:
    if torch.cuda.device_count() < 1 + num_devices:
        pytest.skip(f"needs {1 + num_devices} CUDA devices: one to train, {num_devices} for the engine")
    control = VllmEngine(serve(model, list(range(1, 1 + num_devices))).url, RUN_KEY)
    writer = nccl.Writer("127.0.0.1", num_devices, timeout_s=60)
    trainer = HfTrainer(model, writer, BUFFER_BYTES, torch.bfloat16, "cuda:0")
    sync = make_sync(trainer, control, "nccl")
    for seed in range(1, 4):
        trainer.perturb(seed)
        assert sync.publish() == seed

    trainer.tamper = wrong_checksum_of(VICTIM)
    with pytest.raises(WeightSyncError, match=f"checksum differs for {VICTIM}"):
        sync.publish()
    trainer.tamper = lambda bucket: bucket
    assert sync.publish() == 4
    sync.close()
    control.close()
    writer.close()


# A member of a broadcast: the writer, or a reader that dies at a bucket. Prints a line for each.
MEMBER = """
import json, os, sys
import torch
from vime.errors import WeightSyncError
from vime.weight_sync.nccl import Reader
from vime.wire import BucketMessage, wrong_tensors
device, dies_at = torch.device("cuda", int(sys.argv[1])), int(sys.argv[2])
torch.cuda.set_device(device)
reader = Reader()
print("up", flush=True)
for line in sys.stdin:
    message = BucketMessage.from_json(json.loads(line))
    if message.index == dies_at:
        os._exit(9)
    try:
        print(wrong_tensors(reader.read(message, device), message), flush=True)
    except WeightSyncError as error:
        print(f"WeightSyncError: {error}", flush=True)
"""


def test_a_reader_that_dies_is_an_error_of_the_writer_and_no_hang() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices: NCCL wants one for each member")
    writer = nccl.Writer("127.0.0.1", 1, timeout_s=15)
    tensors = [("x", torch.arange(1 << 22, device="cuda:0"))]
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, "1", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        assert process.stdout.readline() == "up\n"
        for index in range(2):
            message = writer.write(tensors, (t for _, t in tensors), 1, index)
            process.stdin.write(json.dumps(message.to_json()) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == ("[]\n" if index == 0 else "")
        writer.call_off()  # as the sync does when an engine's call fails
        with pytest.raises(WeightSyncError, match="bucket 1 did not reach every engine"):
            for index in (2, 3):
                writer.write(tensors, (t for _, t in tensors), 1, index)
    writer.close()
