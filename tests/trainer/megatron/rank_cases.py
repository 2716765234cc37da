"""What one rank of test_ranks.py does with each case; rank_worker.py runs it."""

import pickle
import time
import traceback
import zlib

import numpy as np
import torch
from megatron.core import tensor_parallel

from vime.config import AlgoConfig, Config, RolloutConfig, SyncConfig, TrainConfig
from vime.errors import TrainingError, VimeError
from vime.platform import get_platform
from vime.trainer.megatron.trainer import MegatronTrainer
from vime.wire import BucketMessage


class KeepingWriter:
    """Keeps what it is sent."""

    def __init__(self):
        self.sent = []

    def write(self, tensors, version, index):
        self.sent += [(name, tensor.cpu().clone()) for name, tensor in tensors]
        return BucketMessage(version, index, (), len(tensors), {})

    def close(self): ...


def run(case, rank, world_size, folder):
    """What one trainer gives on this rank."""
    config = Config(
        algo=AlgoConfig(**case["algo"]),
        rollout=RolloutConfig(rollout_temperature=0.8),
        sync=SyncConfig(update_weight_buffer_size=20_000),
        train=TrainConfig(lr_decay_style="cosine", lr_decay_iters=10),
        megatron={"lr": 1e-2, "adam_eps": 1e-2, **case["megatron"]},
    )
    writer = KeepingWriter() if rank == 0 else None
    trainer = MegatronTrainer(
        config,
        hf_path=str(folder / case["model"]),
        platform=get_platform(case["platform"]),
        rank=rank,
        world_size=world_size,
        init_method=f"file://{folder / ('meet-' + case['name'])}",
        total_steps=10,
        writer=writer,
    )
    out, batches = {}, case["batches"]
    if "load" in case:
        trainer.load(folder / f"ck-{case['load']}")
        batches = batches[1:]
    out["random"] = random_streams()
    out["buckets"] = [None if m is None else m.num_bytes for m in trainer.weights(1)]
    out["log_probs"], out["scores"] = trainer.log_probs(batches[0]), trainer.score([[1, 2, 3], [4, 5, 6, 7, 8]])
    if writer is not None:
        out["first"], writer.sent = writer.sent, []
    out["metrics"] = []
    for k, batch in enumerate(batches):
        if k == 1 and case.get("saves"):
            trainer.save(folder / f"ck-{case['name']}")
        out["metrics"].append(trainer.train(batch))
    if case.get("exports"):
        trainer.export_hf(folder / f"out-{case['name']}")
    list(trainer.weights(2))
    if writer is not None:
        out["last"] = writer.sent
    if "breaks" in case:
        out["errors"] = break_it(trainer, rank, case["breaks"], batches[0])
    trainer.close()
    return out


def random_streams():
    """The states of this rank's random streams, as numbers to compare."""
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = {"own": streams["model-parallel-rng"], "shared": torch.get_rng_state()}
    return {name: zlib.crc32(bytes(state.tolist())) for name, state in states.items()}


def break_it(trainer, rank, broken_rank, batch):
    """The errors of a loss and of a gradient that are not finite on one rank."""
    errors = []
    hook = None
    if rank == broken_rank:
        parameter = next(iter(trainer._policy.chunks[0].decoder.layers[0].parameters()))
        hook = parameter.register_hook(lambda grad: grad * float("nan"))
    for spoil in (False, True):
        if spoil:
            if hook is not None:
                hook.remove()
            batch.advantages[batch.steps[0][-1][0][0]] = np.nan
        try:
            trainer.train(batch)
        except TrainingError as error:
            errors.append(str(error))
    return errors


def main(rank, world_size, folder, cases):
    """Run the cases in FOLDER/CASES; write FOLDER/result-WORLD_SIZE-RANK.pkl, a dict of results by case name."""
    torch.set_num_threads(1)
    results = {}
    for case in pickle.loads((folder / cases).read_bytes()):
        start = time.perf_counter()
        try:
            results[case["name"]] = run(case, rank, world_size, folder)
        except VimeError:
            results[case["name"]] = {"failed": traceback.format_exc()}
            break  # the others may wait in a collective
        if rank == 0:
            print(case["name"], f"{time.perf_counter() - start:.1f} s", flush=True)
    (folder / f"result-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(results))
