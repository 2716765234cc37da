"""Where a stub's tokens come from: a small model computed in plain torch, or dice."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from tests.stub_engine.scheduler import Running


class Brain(Protocol):
    """Makes tokens, one step of a request at a time."""

    def problem(self, sampling: Mapping[str, Any]) -> str | None:
        """Why it cannot sample so; None if it can."""

    def step(self, run: Running, count: int) -> list[list[tuple[int, float]]]:
        """Up to `count` further (token id, log-prob) of every sample that has not ended, an empty list for those."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Use these from now on."""


class Dice:
    """Random tokens of random number; the same for the same seed, prompt and sample, whatever the weights.

    Every token's log-prob is -1.
    """

    def __init__(self, vocab_size: int, eos: frozenset[int]) -> None:
        self._eos = min(eos)
        self._ids = [i for i in range(vocab_size) if i not in eos]

    def problem(self, sampling: Mapping[str, Any]) -> str | None:
        """Anything goes."""
        return None

    def step(self, run: Running, count: int) -> list[list[tuple[int, float]]]:
        """See `Brain`."""
        return [self._sample(run, i, count) if run.finish[i] is None else [] for i in range(run.n)]

    def _sample(self, run: Running, index: int, count: int) -> list[tuple[int, float]]:
        have = len(run.tokens[index])
        rng = random.Random(f"{run.seed} {len(run.prompt)} {sum(run.prompt)} {index}")
        length = rng.randint(1, max(1, run.max_tokens))
        ids = rng.choices(self._ids, k=length)
        if not run.ignore_eos:
            ids[-1] = self._eos
        return [(token, -1.0) for token in ids[have : have + count]]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Dice have none."""


class TinyModel:
    """A dense Qwen3 in float32, sampled token by token: log-probs as exact as an engine's.

    Args:
        config: config.json.
        weights: by HF name.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        if config.get("model_type") != "qwen3":
            raise SystemExit(f"the stub engine computes dense Qwen3 models, not {config.get('model_type')}")
        self._config = config
        self.load(weights)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `Brain`."""
        self._weights = {name: tensor.float() for name, tensor in weights.items()}

    def problem(self, sampling: Mapping[str, Any]) -> str | None:
        """Only the whole distribution is sampled from."""
        if sampling.get("top_p", 1.0) != 1.0 or sampling.get("top_k", 0) not in (0, -1):
            return "the stub engine samples without top_p and top_k"
        return "the stub engine knows no stop strings" if sampling.get("stop") else None

    def step(self, run: Running, count: int) -> list[list[tuple[int, float]]]:
        """See `Brain`; one token, whatever `count`. Samples of one request that go on have one length."""
        import torch

        going = [i for i in range(run.n) if run.finish[i] is None]
        with torch.no_grad():
            logits = self.logits(torch.tensor([[*run.prompt, *run.tokens[i]] for i in going]))[:, -1]
            if run.temperature > 0:
                logits = logits / run.temperature
            log_probs = torch.log_softmax(logits, -1)
        found: list[list[tuple[int, float]]] = [[] for _ in range(run.n)]
        for row, i in enumerate(going):
            of_token = log_probs[row]
            if run.temperature > 0:
                token = int(torch.multinomial(of_token.exp(), 1, generator=self._generator(run, i)))
            else:
                token = int(of_token.argmax())
            found[i] = [(token, float(of_token[token]))]
        return found

    @staticmethod
    def _generator(run: Running, index: int) -> torch.Generator:
        import torch

        if index not in run.generators:
            run.generators[index] = torch.Generator()
            if run.seed is None:
                run.generators[index].seed()
            else:
                run.generators[index].manual_seed(run.seed + index)
        return run.generators[index]

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, S] -> logits: [B, S, V]."""
        from torch.nn.functional import linear, silu

        w, config = self._weights, self._config
        x = w["model.embed_tokens.weight"][ids]
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}."
            x = x + self._attention(layer, self._norm(x, layer + "input_layernorm.weight"))
            h = self._norm(x, layer + "post_attention_layernorm.weight")
            gate, up = (linear(h, w[f"{layer}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + linear(silu(gate) * up, w[layer + "mlp.down_proj.weight"])
        tied = config.get("tie_word_embeddings", False)
        head = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
        result: torch.Tensor = linear(self._norm(x, "model.norm.weight"), head)
        return result

    def _attention(self, layer: str, h: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import linear, scaled_dot_product_attention

        w, size = self._weights, self._config["head_dim"]
        batch, length, _ = h.shape

        def heads(part: str) -> torch.Tensor:
            return linear(h, w[f"{layer}self_attn.{part}_proj.weight"]).view(batch, length, -1, size)

        q = self._rotate(self._norm(heads("q"), layer + "self_attn.q_norm.weight"))
        k = self._rotate(self._norm(heads("k"), layer + "self_attn.k_norm.weight"))
        q, k, v = (t.transpose(1, 2) for t in (q, k, heads("v")))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear(out.transpose(1, 2).reshape(batch, length, -1), w[layer + "self_attn.o_proj.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        from torch.nn.functional import rms_norm

        weight = self._weights[name]
        return rms_norm(x, weight.shape, weight, self._config["rms_norm_eps"])

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding over x: [B, S, heads, size], halves rotated against each other."""
        import torch

        size = x.shape[-1]
        theta = self._config.get("rope_theta") or self._config["rope_parameters"]["rope_theta"]
        angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def end_tokens(folder: Path) -> frozenset[int]:
    """The ids at which a response ends, as vLLM reads them."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids: Sequence[int] = found if isinstance(found, list) else [] if found is None else [found]
            return frozenset(ids)
    return frozenset()


def make_brain(kind: str, folder: Path) -> Brain:
    """The brain of that name for the checkpoint in `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if kind == "dice":
        return Dice(config["vocab_size"], end_tokens(folder) or frozenset({0}))
    if kind != "model":
        raise SystemExit(f"no brain is called {kind!r}; there are model and dice")
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return TinyModel(config, weights)
