"""A resume reads of the optimizer's state what the rank updates. Of several ranks: the rows of the matrix that load."""

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import Range

from vime.errors import TrainingError
from vime.trainer.megatron.checkpoints import checkpoint, stored_tensors
from vime.trainer.megatron.checkpoints.gathered_state import KEYS
from vime.trainer.megatron.checkpoints.own_state import OwnState, merged_in_place
from vime.trainer.megatron.checkpoints.stored_tensors import StoredTensors

PIECE = 97


def states(trainer):
    """(optimizer, parameter's places, its tensors) of each parameter of a trainer."""
    for optimizer in trainer._policy.optimizer.chained_optimizers:
        for by_dtype in optimizer.gbuf_ranges:
            for buckets in by_dtype.values():
                for bucket in buckets:
                    for parameter, places in bucket["param_map"].items():
                        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                        yield places, {key: tensors[key].detach().view(-1) for key in KEYS}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_rank_reads_its_own_part_alone_in_pieces(model_folder, make_trainer, make_batch, tmp_path, monkeypatch, kind):
    """Each third of every parameter, as if three ranks updated them."""
    folder, _ = model_folder(kind)
    trainer = make_trainer(folder)
    trainer.train(make_batch([9, 4, 17, 6]))
    trainer.save(tmp_path / "ck")
    want = [{key: tensor.clone() for key, tensor in tensors.items()} for _, tensors in states(trainer)]
    whole = [dict(places) for places, _ in states(trainer)]
    read, counts = stored_tensors._StoredChunk.read, []
    monkeypatch.setattr(
        stored_tensors._StoredChunk, "read", lambda self, first, n: counts.append(n) or read(self, first, n)
    )
    seen = 0
    for third in range(3):
        for places, before in zip((p for p, _ in states(trainer)), whole, strict=True):
            size = before["param"].size
            places["param"] = Range(size * third // 3, size * (third + 1) // 3)
        for _, tensors in states(trainer):
            for tensor in tensors.values():
                tensor.zero_()
        policy = trainer._policy
        state = checkpoint._state(policy, with_optimizer=False, is_loading=True)
        OwnState(policy.optimizer, state).read(StoredTensors(tmp_path / "ck"), piece=PIECE)
        for (places, tensors), expected in zip(states(trainer), want, strict=True):
            own = slice(places["param"].start, places["param"].end)
            for key, tensor in tensors.items():
                length = own.stop - own.start
                assert torch.equal(tensor[:length], expected[key][own])
                assert not tensor[length:].any()
        seen += sum(counts)
        assert max(counts) <= PIECE
        counts.clear()
    assert seen == sum(tensor.numel() for tensors in want for tensor in tensors.values())


def test_a_resume_reads_each_number_of_the_state_once(model_folder, make_trainer, make_batch, tmp_path, monkeypatch):
    folder, _ = model_folder("qwen3_moe")
    trainer = make_trainer(folder)
    trainer.train(make_batch([9, 4, 17, 6]))
    trainer.save(tmp_path / "ck")
    read, counts = stored_tensors._StoredChunk.read, []
    monkeypatch.setattr(
        stored_tensors._StoredChunk, "read", lambda self, first, n: counts.append(n) or read(self, first, n)
    )
    loads = []
    load = checkpoint.dist_checkpointing.load
    monkeypatch.setattr(
        checkpoint.dist_checkpointing, "load", lambda state, path: loads.append(state) or load(state, path)
    )
    resumed = make_trainer(folder)
    resumed.load(tmp_path / "ck")
    assert sum(counts) == sum(tensor.numel() for _, tensors in states(resumed) for tensor in tensors.values())
    assert [optimizer["param_state"] for optimizer in loads[0]["optimizer"].values()] == [None, None]


def test_state_of_another_optimizer_is_refused(model_folder, make_trainer, tmp_path):
    folder, _ = model_folder()
    make_trainer(folder, megatron={"use_distributed_optimizer": False}).save(tmp_path / "ck")
    with pytest.raises(TrainingError, match=r"ck cannot be read \(ValueError: it has no optimizer.state.param"):
        make_trainer(folder).load(tmp_path / "ck")


def test_state_of_another_shape_is_refused(model_folder, make_trainer, tmp_path):
    folder, _ = model_folder(layers=3)
    trainer = make_trainer(folder)
    trainer.save(tmp_path / "ck")
    folder, _ = model_folder(layers=2)
    trainer = make_trainer(folder)
    state = checkpoint._state(trainer._policy, with_optimizer=False, is_loading=True)
    with pytest.raises(ValueError, match=r"is of \(3, .*\), but \(2, .*\) in this run"):
        OwnState(trainer._policy.optimizer, state).check(StoredTensors(tmp_path / "ck"))


def test_what_is_loaded_in_place_is_not_merged_into_another_tensor():
    whole = torch.arange(6.0).view(2, 3)
    factory = ShardedTensorFactory("x", whole, lambda *_: [], torch.cat)
    merge = merged_in_place(factory).merge_fn
    assert merge(list(whole.chunk(2))) is whole
    assert torch.equal(merge([whole[:1].clone(), whole[1:]]), whole)
