"""Routing replay on one CUDA device: no micro-batch waits for the device, and the own choice changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.routed import own_experts
from tests.trainer.megatron.routed_experts import random_experts
from vime.config import TrainConfig
from vime.platform import get_platform
from vime.trainer.megatron.batches.routing_replay import Routers, RoutingPass, Tally
from vime.types import RoutedExperts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = get_platform("cuda")
LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]


def top_k(scores, topk, num_groups=None, group_topk=None):
    return torch.topk(scores, topk, dim=1)


@pytest.mark.parametrize("experts", [128, 300])
def test_a_micro_batch_is_told_its_experts_without_waiting_for_the_device(experts):
    g, lengths, layers, k = np.random.default_rng(0), np.array([900, 4000, 1]), 5, 8
    dtype = np.uint8 if experts <= 256 else np.uint16
    rows = g.random((int(lengths.sum()), layers, experts)).argsort(-1)[..., :k].astype(dtype)
    device = torch.device("cuda")
    routers = Routers((1, 2, 4), num_layers=layers, num_experts=experts, top_k=k)
    tally, used = Tally(routers, device), {}
    told = RoutingPass(routers, device, RoutedExperts(rows, lengths), record_into=used, tally=tally)
    total = int(lengths.sum()) + 3
    numbers, positions = np.repeat([0, 1, 2, 0], [*lengths, 3]), np.concatenate([np.arange(n) for n in (*lengths, 3)])
    scores = torch.randn(total, experts, device=device, requires_grad=True)
    torch.zeros(1).pin_memory()  # the first wants a context
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        micro = told.micro_batch((0, 1, 2), numbers, positions, np.arange(total) < total - 3)
        chosen = [micro.of_layer(layer).get_replay_topk(scores, k, None, None, top_k) for layer in routers.layers]
        sum(values.sum() for values, _ in chosen).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for layer, (values, experts_used) in zip(routers.layers, chosen, strict=True):
        want = np.concatenate([rows[:, layer].astype(int), scores[-3:].topk(k).indices.cpu().numpy()])
        np.testing.assert_array_equal(experts_used.cpu().numpy(), want)
        assert torch.equal(values, scores.gather(1, experts_used))
    np.testing.assert_array_equal(used[(0, 1, 2)].cpu().numpy().astype(int)[:-3], rows[:, [1, 2, 4]].astype(int))
    assert tally.replayed == total - 3 and int(tally.differing.min()) > 0.9 * total and not int(tally.repeated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_replaying_the_own_choice_changes_nothing(model_folder, make_trainer, make_batch, kind, dtype):
    folder, _ = model_folder(kind, tied=False, dtype=dtype)
    batch = make_batch(LENGTHS, micro=3)
    trainer = make_trainer(folder, platform=CUDA)
    given = replace(batch, routed_experts=own_experts(trainer, batch))
    other = replace(batch, routed_experts=random_experts(batch, layers=2, experts=8, top_k=2))
    free, replayed, elsewhere = (trainer.log_probs(b) for b in (batch, given, other))
    # A token's experts are added up in no certain order there.
    bound = 1e-5 if dtype == torch.float32 else 0.1
    assert np.nanmax(np.abs(replayed - free)) < bound
    assert np.nanmax(np.abs(elsewhere - free)) > 0.1
    assert trainer.train(given)["train/routing_replay_differs"] <= 1 / len(batch.tokens)


def test_steps_replay_what_the_old_policy_chose(model_folder, make_trainer, make_batch):
    folder, _ = model_folder("qwen3_moe", tied=False)
    batch = make_batch(LENGTHS, micro=2, steps=2)

    def train(records, given):
        train = TrainConfig(use_routing_replay=records)
        trainer = make_trainer(folder, train=train, megatron={"lr": 3e-2}, platform=CUDA)
        return trainer.train(replace(batch, routed_experts=own_experts(trainer, batch)) if given else batch)

    recorded, told, free = train(True, False), train(False, True), train(False, False)
    assert recorded["train/loss"] == pytest.approx(told["train/loss"], rel=1e-4)
    assert free["train/loss"] != pytest.approx(told["train/loss"], rel=1e-4)
