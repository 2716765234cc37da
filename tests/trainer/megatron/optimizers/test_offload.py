"""Storages leave and come back; views of them never notice."""

import mmap

import pytest
import torch

from vime.config import AlgoConfig
from vime.trainer.megatron.optimizers.offload import DeviceParts, HostArena, Offloader


def test_views_keep_their_values_and_the_memory_is_freed_meanwhile():
    flat = torch.arange(12.0)
    views = [flat[:5], flat[5:].view(7, 1)]
    gradients = torch.ones(4)
    offloader = Offloader()
    assert offloader.offload("all", views, drop=[gradients, flat]) == 16 * 4  # what two views share counts once
    assert flat.untyped_storage().nbytes() == 0 and gradients.untyped_storage().nbytes() == 0
    assert offloader.is_away("all")
    assert offloader.onload("all") == 16 * 4
    assert torch.equal(flat, torch.arange(12.0)) and torch.equal(views[1].flatten(), torch.arange(5.0, 12.0))
    assert torch.equal(gradients, torch.zeros(4))  # dropped contents are not kept
    assert offloader.onload("all") == 0  # nothing is offloaded: nothing happens


def test_parts_leave_and_come_back_one_by_one_and_new_contents_go_with_them():
    weights, state = torch.zeros(1000), torch.ones(7, dtype=torch.bfloat16)
    offloader = Offloader()
    for turn in range(3):
        offloader.offload("state", [state])
        offloader.offload("weights", [weights, state])  # what has left already is left alone
        offloader.onload("weights")
        assert torch.equal(weights, torch.full((1000,), float(turn))) and not state.untyped_storage().nbytes()
        offloader.onload("state")
        assert torch.equal(state, torch.full((7,), 1.0 + turn, dtype=torch.bfloat16))
        weights += 1
        state += 1
    offloader.close()


def test_host_memory_is_kept_for_the_next_turn():
    arena = HostArena()
    arena.reserve(100, pinned=False)
    first = arena.slice(0, 1).data_ptr()
    arena.reserve(60, pinned=False)
    assert arena.slice(0, 1).data_ptr() == first
    assert first % mmap.PAGESIZE == 0  # pages of its own, which are pinned once
    arena.close()
    assert arena.slice(0, 10).numel() == 0


def test_offloading_twice_is_an_error():
    offloader = Offloader()
    offloader.offload("all", [torch.ones(2)])
    with pytest.raises(RuntimeError, match="already"):
        offloader.offload("all", [torch.ones(2)])


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", torch.float32), ("glm4_moe", torch.bfloat16)])
def test_a_trainer_trains_on_after_its_parts_were_away(model_folder, make_trainer, make_batch, kind, dtype):
    """Experts have an optimizer of their own; in float32 the master weights are the weights."""
    folder, _ = model_folder(kind, dtype=dtype)
    batch = make_batch([9, 4, 17])
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1)

    def two_steps(away):
        trainer = make_trainer(folder, algo=algo)
        trainer.train(batch)
        if away:
            parts = DeviceParts(trainer._policy, "cpu")
            scores = trainer.score([[5, 6, 7]])[0][1:].tolist()
            for _ in range(2):
                parts.offload(["state"])
                parts.offload(["weights"])
                parts.offload()  # both have left
                assert not any(t.untyped_storage().nbytes() for t in (*parts._weights(), *parts._state()))
                assert not any(t.untyped_storage().nbytes() for t in trainer._policy.grad_buffers())
                parts.onload(["weights"])
                assert trainer.score([[5, 6, 7]])[0][1:].tolist() == scores  # needs the weights alone
                parts.onload()
        return trainer.train(batch), {n: t.clone() for n, t in trainer._hf_tensors()}

    (want, want_weights), (got, got_weights) = two_steps(False), two_steps(True)
    assert got["train/grad_norm"] == want["train/grad_norm"]
    assert all(torch.equal(t, want_weights[n]) for n, t in got_weights.items())
