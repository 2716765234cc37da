"""What one rank does with each case of the parallel matrix; rank_worker.py runs it."""

import faulthandler
import math
import os
import pickle
import traceback
import zlib
from collections import deque

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.router import TopKRouter

from tests.trainer.megatron.layout_case import CRITIC, LOSSES
from tests.trainer.megatron.peak_memory import PeakMemory
from tests.trainer.megatron.rank_processes import result_file
from vime.config import AlgoConfig, Config, CriticConfig, RolloutConfig, SyncConfig, TeacherConfig, TrainConfig
from vime.errors import TrainingError
from vime.platform import get_platform
from vime.trainer.megatron.trainer import MegatronTrainer
from vime.wire import BucketMessage


class KeepingWriter:
    """Keeps what it is sent."""

    def __init__(self):
        self.sent = []

    def write(self, outlines, contents, version, index):
        for (name, outline), tensor in zip(outlines, contents, strict=True):
            assert (outline.shape, outline.dtype) == (tensor.shape, tensor.dtype), name
            self.sent.append((name, tensor.cpu().clone()))
        return BucketMessage(version, index, (), len(outlines), {})

    def close(self): ...


def gather_peak(trainer):
    """(bytes of tensors alive at once on this rank while weights go out, bytes of Megatron's largest tensor).

    Of experts, which go out one by one, it is one expert's matrix.
    """
    known = [t for chunk in trainer._policy.chunks for t in (*chunk.parameters(), *chunk.buffers())]
    known += [host for kept in trainer._others._sent.values() for _, host in kept._places()]  # --keep-old-actor's
    sizes = []
    for home in trainer._homes.values():
        shapes = home.shapes[:1] if home.holders else home.shapes
        sizes.append(sum(math.prod(shape) for shape in shapes) * home.dtype.itemsize)
    writer, trainer._writer = trainer._writer, None
    with PeakMemory(known) as peak:
        deque(trainer.weights(1), maxlen=0)
    trainer._writer = writer
    return peak.peak, max(sizes)


def run(case, rank, world_size, folder, platform):
    """What one trainer gives on this rank."""
    has_critic = case.loss == "ppo"
    config = Config(
        algo=AlgoConfig(**LOSSES[case.loss]),
        teacher=TeacherConfig(opd_teacher_load=str(folder / case.model)) if case.loss == "taught" else TeacherConfig(),
        critic=CriticConfig(critic_load=str(folder / f"critic {case.model}"), **CRITIC)
        if has_critic
        else CriticConfig(),
        rollout=RolloutConfig(rollout_temperature=0.8),
        sync=SyncConfig(update_weight_buffer_size=20_000),
        train=TrainConfig(lr_decay_style="cosine", lr_decay_iters=10, use_routing_replay=case.replay == "own"),
        megatron={"lr": 1e-2, "adam_eps": 1e-2, **case.megatron},
    )
    writer = KeepingWriter() if rank == 0 else None
    trainer = MegatronTrainer(
        config,
        hf_path=str(folder / case.model),
        platform=get_platform(platform),
        rank=rank,
        world_size=world_size,
        init_method=f"file://{folder / f'meet {case}'}",
        total_steps=10,
        writer=writer,
    )
    out, batches = {}, case.batches
    if case.loads:
        trainer.load(folder / f"checkpoint {case.loads}")
        batches = batches[1:]
    out["random"] = random_streams()
    out["buckets"] = [None if m is None else m.num_bytes for m in trainer.weights(1)]
    out["gathered"] = gather_peak(trainer)  # of a version that is known, so that --keep-old-actor keeps no other
    out["log_probs"], out["scores"] = trainer.log_probs(batches[0]), trainer.score([[1, 2, 3], [4, 5, 6, 7, 8]])
    if has_critic:
        out["values"] = trainer.values(batches[0])
    if writer is not None:
        out["first"], writer.sent = writer.sent, []
    out["metrics"] = []
    for k, batch in enumerate(batches):
        if k == 1 and case.saves:
            trainer.save(folder / f"checkpoint {case}")
        out["metrics"].append(trainer.train(batch))
    out["last_log_probs"] = trainer.log_probs(batches[0])
    if has_critic:
        out["last_values"] = trainer.values(batches[0])
    if case.exports:
        trainer.export_hf(folder / f"export {case}")
    list(trainer.weights(2))
    if writer is not None:
        out["last"] = writer.sent
    if case.breaks is not None:
        out["errors"] = break_it(trainer, rank, case.breaks, batches[0])
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


class RoutingMargin:
    """Watches routers: `smallest` is how far the last expert that a token took was ahead of the first it left.

    Where that is as small as rounding, another order of sums may choose another expert, and neither is wrong: such a
    model proves nothing.
    """

    def __init__(self):
        self.smallest = float("inf")
        original = TopKRouter.routing

        def routing(router, logits, *args, **kwargs):
            scores = logits.detach().float()
            if router.score_function == "sigmoid":
                scores = scores.sigmoid() + (0 if router.expert_bias is None else router.expert_bias)
            best = scores.topk(router.topk + 1, dim=-1).values
            self.smallest = min(self.smallest, float((best[..., -2] - best[..., -1]).min()))
            return original(router, logits, *args, **kwargs)

        TopKRouter.routing = routing


def main(rank, world_size, folder, cases, platform, limit_s):
    """Run the cases in FOLDER/CASES, each into its file (`result_file`): what `run` gives, or why it failed."""
    torch.set_num_threads(1)
    margin, parent = RoutingMargin() if world_size == 1 else None, os.getppid()
    for case in pickle.loads((folder / cases).read_bytes()):
        if os.getppid() != parent:
            return  # nobody waits for the rest
        faulthandler.dump_traceback_later(limit_s * 0.9)
        try:
            result = run(case, rank, world_size, folder, platform)
            if margin is not None:
                result["routing_margin"], margin.smallest = margin.smallest, float("inf")
        except Exception:
            result = {"failed": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        file = result_file(folder, case, world_size, rank)
        file.with_suffix(".part").write_bytes(pickle.dumps(result))
        file.with_suffix(".part").rename(file)
        if "failed" in result:
            break  # the others may wait in a collective: whoever started these processes starts new ones
