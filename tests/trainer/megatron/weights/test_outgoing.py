"""Weights on their way to engines: what a rank holds meanwhile."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from vime.trainer.megatron.weights.outgoing import send_buckets
from vime.weight_sync.layout import lay_out
from vime.wire import BucketMessage, aligned

LARGEST = 40_000


class TwoPlaces:
    """A writer whose buckets lie in two places, as those of every transport do."""

    def __init__(self, size):
        self.places = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        self.sent = []

    def write(self, outlines, contents, version, index):
        specs, data = lay_out(outlines, contents, lambda num_bytes: self.places[index % 2][:num_bytes])
        self.sent += [spec.name for spec in specs]
        return BucketMessage(version, index, specs, data.numel(), {})


class Gathered:
    """A stream of tensors that counts the bytes of those alive, at their most."""

    def __init__(self, sizes):
        self.outlines = [(f"t{i}", torch.empty(size, dtype=torch.uint8, device="meta")) for i, size in enumerate(sizes)]
        self.now = self.peak = 0

    def __iter__(self):
        for name, outline in self.outlines:
            tensor = torch.ones(outline.shape, dtype=torch.uint8)
            self.now += tensor.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor, self._freed, tensor.nbytes)
            yield name, tensor
            del tensor

    def _freed(self, num_bytes):
        self.now -= num_bytes


@pytest.mark.parametrize("max_bytes", [10_000, 100_000])
def test_no_more_than_a_tensor_is_held_besides_the_places_of_the_buckets(max_bytes):
    sizes = [3_000, 7_000, LARGEST, 64, 1, 9_000, *[5_000] * 20]
    gathered = Gathered(sizes)
    writer = TwoPlaces(max(max_bytes, aligned(LARGEST)))
    gc.disable()  # what is freed, is freed by the last reference
    try:
        messages = list(send_buckets(writer, gathered.outlines, iter(gathered), max_bytes, 4))
    finally:
        gc.enable()
    assert writer.sent == [name for name, _ in gathered.outlines]
    assert len(messages) > 1 and max(message.num_bytes for message in messages) <= len(writer.places[0])
    assert gathered.peak == LARGEST


def test_a_rank_without_a_writer_goes_at_the_same_pace():
    gathered = Gathered([5_000] * 8)
    assert list(send_buckets(None, gathered.outlines, iter(gathered), 10_240, 4)) == [None] * 4
    assert gathered.peak == 5_000
