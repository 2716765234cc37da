"""Both ends of a transport in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vime.protocols import BucketReader, BucketWriter
from vime.wire import BucketMessage, view_tensors

CPU = torch.device("cpu")


def write(writer: BucketWriter, tensors: Sequence[tuple[str, torch.Tensor]], version: int, index: int) -> BucketMessage:
    """Write tensors that are there already."""
    return writer.write(tensors, (tensor for _, tensor in tensors), version, index)


def read(reader: BucketReader, message: BucketMessage, device: torch.device = CPU) -> list[tuple[str, Any]]:
    """The named tensors of a bucket."""
    return view_tensors(reader.read(message, device), message)
