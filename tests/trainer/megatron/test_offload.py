"""Storages leave and come back; views of them never notice."""

import pytest
import torch

from vime.trainer.megatron.offload import Offloader, device_tensors


def test_views_keep_their_values_and_the_memory_is_freed_meanwhile():
    flat = torch.arange(12.0)
    views = [flat[:5], flat[5:].view(7, 1)]
    gradients = torch.ones(4)
    offloader = Offloader()
    offloader.offload(views, drop=[gradients, flat])
    assert flat.untyped_storage().nbytes() == 0 and gradients.untyped_storage().nbytes() == 0
    offloader.onload()
    assert torch.equal(flat, torch.arange(12.0)) and torch.equal(views[1].flatten(), torch.arange(5.0, 12.0))
    assert torch.equal(gradients, torch.zeros(4))  # dropped contents are not kept
    offloader.onload()  # nothing is offloaded: nothing happens


def test_offloading_twice_is_an_error():
    offloader = Offloader()
    offloader.offload([torch.ones(2)])
    with pytest.raises(RuntimeError, match="already"):
        offloader.offload([torch.ones(2)])


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe"])  # experts have an optimizer of their own
def test_a_trainer_trains_on_after_its_storages_were_away(model_folder, make_trainer, make_batch, kind):
    folder, _ = model_folder(kind, dtype=torch.bfloat16)
    batch = make_batch([9, 4, 17])

    def two_steps(away):
        trainer = make_trainer(folder)
        trainer.train(batch)
        if away:
            keep, drop = device_tensors(trainer._policy, trainer._reference, "cpu")
            offloader = Offloader()
            offloader.offload(keep, drop=drop)
            offloader.onload()
        return trainer.train(batch), {n: t.clone() for n, t in trainer._hf_tensors()}

    (want, want_weights), (got, got_weights) = two_steps(False), two_steps(True)
    assert got["train/grad_norm"] == want["train/grad_norm"]
    assert all(torch.equal(t, want_weights[n]) for n, t in got_weights.items())
