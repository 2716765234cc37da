"""What is gathered for a checkpoint equals megatron-core's. Of several ranks: the rows of the matrix that save."""

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from vime.trainer.megatron.checkpoints.gathered_state import KEYS, own_tensors, world_tensors
from vime.trainer.megatron.patches.fixes import _places_without_padding

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}


@pytest.mark.parametrize("flags", [{}, BUCKETS, {"pad_buckets_for_high_nccl_busbw": True, **BUCKETS}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_that_of_megatron(model_folder, make_trainer, make_batch, flags, dtype):
    folder, _ = model_folder(dtype=dtype)
    trainer = make_trainer(folder, megatron=flags)
    trainer.train(make_batch([9, 4, 17, 6]))
    (optimizer,) = trainer._policy.optimizer.chained_optimizers
    want = DistributedOptimizer.get_parameter_state_dp_zero.__wrapped__(optimizer, use_gloo_comm=False)
    (buffer,), ((kind, buckets),) = optimizer.buffers, optimizer.gbuf_ranges[0].items()
    assert len(buffer.buckets) > 1 or not flags
    buffer.param_index_map = _places_without_padding(buffer)  # as it is where the state is taken
    gathered = world_tensors(optimizer, buffer, buckets, piece=997)
    own = own_tensors(optimizer, buffer)
    for key in KEYS:
        assert torch.equal(gathered[key], want[0][kind][key]) and gathered[key].count_nonzero()
        for start, stop, _ in buffer.param_index_map.values():
            assert torch.equal(own[key][start:stop], want[0][kind][key][start:stop])
