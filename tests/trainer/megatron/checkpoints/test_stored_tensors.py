"""Ranges of stored tensors; whole ones are read in test_convert.py."""

import itertools
import pickle
import random
from math import prod

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vime.trainer.megatron.checkpoints import stored_tensors
from vime.trainer.megatron.checkpoints.shard_file import ShardFile
from vime.trainer.megatron.checkpoints.stored_tensors import Box, StoredTensors, boxes


def store(folder, key, tensor, chunk):
    """Write a tensor cut into chunks of this shape."""
    starts = list(itertools.product(*(range(0, n, c) for n, c in zip(tensor.shape, chunk, strict=True))))
    with ShardFile(folder, 0) as file:
        for start in starts:
            part = tensor[tuple(slice(s, s + c) for s, c in zip(start, chunk, strict=True))]
            file.add(MetadataIndex(key, torch.Size(start)), part.contiguous())
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(chunk)) for start in starts]
    entry = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    places = {result.index: result.storage_data for result in file.results}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({key: entry}, storage_data=places)))


def test_a_range_of_a_flat_tensor_is_a_few_boxes():
    dice = random.Random(1)
    for _ in range(500):
        sizes = tuple(dice.randint(1, 4) for _ in range(dice.randint(1, 4)))
        begin, end = sorted(dice.randint(0, prod(sizes)) for _ in range(2))
        whole = torch.arange(prod(sizes)).view(sizes)
        cut = list(boxes(sizes, begin, end))
        places = [tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True)) for b in cut]
        assert [number for place in places for number in whole[place].flatten().tolist()] == list(range(begin, end))
        assert len(cut) < 2 * len(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_range_is_read_across_chunks_and_never_more_than_a_piece_at_a_time(tmp_path, monkeypatch, dtype):
    tensor = torch.arange(6 * 8 * 10).view(6, 8, 10).to(dtype)
    store(tmp_path, "x", tensor, (3, 4, 5))
    stored = StoredTensors(tmp_path)
    read = stored_tensors._StoredChunk.read
    counts = []
    monkeypatch.setattr(
        stored_tensors._StoredChunk, "read", lambda self, first, n: counts.append(n) or read(self, first, n)
    )
    dice = random.Random(2)
    for case in range(100):
        piece = (1, 7, 12, 50)[case % 4]
        low = [dice.randrange(n) for n in tensor.shape]
        high = [dice.randint(a + 1, n) for a, n in zip(low, tensor.shape, strict=True)]
        box = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
        flat = tensor[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].flatten()
        begin, end = sorted(dice.randint(0, flat.numel()) for _ in range(2))
        out = torch.full((end - begin,), -1.0)
        assert stored.read_range("x", box, begin, out, piece=piece) == end - begin
        assert torch.equal(out, flat[begin:end].float())
        assert max(counts, default=0) <= piece
        counts.clear()


def test_what_is_not_stored_stays_as_it_was(tmp_path):
    store(tmp_path, "x", torch.ones(4, 3), (4, 3))
    out = torch.zeros(15)
    assert StoredTensors(tmp_path).read_range("x", Box((2, 0), (5, 3)), 0, out) == 6
    assert out.tolist() == [1.0] * 6 + [0.0] * 9


def test_a_file_that_ends_too_early_is_an_error(tmp_path):
    store(tmp_path, "x", torch.ones(100), (100,))
    stored = StoredTensors(tmp_path)
    out = torch.zeros(100)
    stored.read_range("x", Box((0,), (100,)), 0, out)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(ValueError, match="ends too early"):
        stored.read_range("x", Box((0,), (100,)), 0, out)
