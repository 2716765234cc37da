"""A trainer that only publishes: an HF model's weights, through a real writer, scored by HF itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.protocols import BucketWriter
from vime.wire import BucketMessage, make_buckets

Named = tuple[str, torch.Tensor]


class HfTrainer:
    """The parts of `Trainer` a weight sync uses.

    `edit` changes the stream of (name, tensor); `tamper` sees each bucket after it was written; `names` replaces the
    announced names.
    """

    def __init__(
        self,
        folder: Path,
        writer: BucketWriter,
        max_bytes: int = 100_000,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self._names = list(self._tensors())
        self.writer, self.max_bytes = writer, max_bytes
        self.edit: Callable[[Iterator[Named]], Iterator[Named]] = lambda stream: stream
        self.tamper: Callable[[BucketMessage], BucketMessage] = lambda bucket: bucket
        self.names: Callable[[list[str]], list[str]] = lambda names: names

    def perturb(self, seed: int, scale: float = 0.05) -> None:
        """Change every weight, and the buffers that a checkpoint has."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.add_((torch.randn(tensor.shape, generator=generator) * scale).to(tensor.device))

    def weight_names(self) -> list[str]:
        return self.names(list(self._names))

    def weights(self, version: int) -> Iterator[BucketMessage]:
        stream = self.edit(iter(self._tensors().items()))
        for index, bucket in enumerate(make_buckets(stream, self.max_bytes)):
            yield self.tamper(self.writer.write(bucket, (tensor for _, tensor in bucket), version, index))

    def call_off_weights(self) -> None:
        self.writer.call_off()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        scores = []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], device=self.model.device)
            with torch.no_grad():
                log_probs = self.model(ids).logits[0, :-1].float().log_softmax(-1)
            scored = log_probs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()
            scores.append(np.concatenate([[np.nan], scored]).astype(np.float32))
        return scores

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Weights under the checkpoint's names; transformers keeps a layer's experts in one tensor, files do not."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
                continue
            prefix, _, last = name.rpartition(".")
            if last == "gate_up_proj" and tensor.ndim == 3:
                for expert, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                    tensors[f"{prefix}.{expert}.up_proj.weight"] = up
            elif last == "down_proj" and tensor.ndim == 3:
                for expert, down in enumerate(tensor):
                    tensors[f"{prefix}.{expert}.down_proj.weight"] = down
            else:
                tensors[name] = tensor
        return tensors


def wrong_checksum_of(name: str) -> Callable[[BucketMessage], BucketMessage]:
    """For `HfTrainer.tamper`: what is read of this tensor differs from what its message says."""

    def tamper(bucket: BucketMessage) -> BucketMessage:
        specs = [replace(spec, checksum=spec.checksum ^ (spec.name == name)) for spec in bucket.tensors]
        return replace(bucket, tensors=tuple(specs))

    return tamper
