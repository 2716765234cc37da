"""The model's weights on their way out under their HF names: to engines in buckets, and into HF checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vime.models import NameMap
from vime.protocols import BucketWriter
from vime.trainer.megatron import parallel
from vime.trainer.megatron.weights import hf_io
from vime.types import PolicyVersion
from vime.wire import BucketMessage, make_buckets


def send_buckets(
    writer: BucketWriter | None,
    outlines: Sequence[tuple[str, Tensor]],
    tensors: Iterator[tuple[str, Tensor]],
    max_bytes: int,
    version: PolicyVersion,
) -> Iterator[BucketMessage | None]:
    """Write all tensors in buckets; None for each where there is no writer. Collective, to the end.

    Tensors are gathered as the writer takes them, so that rank 0 holds one of them besides the writer's buckets. A
    bucket is valid until the next but one is asked for.

    Args: outlines, tensors: as `shards.outlines` and `shards.hf_tensors` give them.
    """
    contents = map(itemgetter(1), tensors)  # which, unlike a loop, keeps no tensor while the next is made
    for index, bucket in enumerate(make_buckets(outlines, max_bytes)):
        part = islice(contents, len(bucket))
        message = writer.write(bucket, part, version, index) if writer is not None else None
        deque(part, maxlen=0)  # where nobody took them: hands rank 0 its parts
        yield message


def export_hf(
    tensors: Iterator[tuple[str, Tensor]], names: NameMap, source: Path, target: Path, *, dtype: torch.dtype
) -> None:
    """Write an HF checkpoint with all that the source has besides the model; see `hf_io.export_hf`. Collective."""
    if dist.get_rank() == 0:
        hf_io.export_hf(chain(tensors, hf_io.kept_tensors(source, names)), source, target, dtype=dtype)
    else:
        for _ in tensors:
            pass  # hands rank 0 its parts
    parallel.barrier()
