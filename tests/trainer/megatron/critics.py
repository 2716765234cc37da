"""Checkpoints with a value head, and what transformers and plain loops compute of them."""

import json
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def write_critic(folder, source, *, seed=0, bias=True, scale=0.5):
    """A copy of a checkpoint with a `score` head, as transformers writes a token classifier; returns (weight, bias)."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [
        name.replace("ForCausalLM", "ForTokenClassification") for name in config["architectures"]
    ]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    dtype = tensors["model.norm.weight"].dtype
    weight = (scale * torch.randn(1, config["hidden_size"], generator=generator)).to(dtype)
    tensors["score.weight"], value = weight, torch.zeros(1, dtype=dtype)
    if bias:
        value = tensors["score.bias"] = torch.tensor([0.25], dtype=dtype)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return weight, value


def state_values(model, head, batch):
    """[T] float32, differentiable: the value of the state behind each token, by the transformers model of the trunk."""
    weight, bias = head
    out = []
    for i in range(batch.num_samples):
        ids = torch.from_numpy(batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].astype(np.int64))[None]
        hidden = model.model(ids).last_hidden_state[0]
        out.append((hidden.float() @ weight.float().t() + bias.float())[:, 0])
    return torch.cat(out)


def before_tokens(values, batch):
    """[T] the value before each token, of those behind each; NaN at each sample's first."""
    out = torch.full_like(values, torch.nan)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        out[start + 1 : end] = values[start : end - 1]
    return out


def plain_gae(rewards, values, mask, at_end, gamma, lam):
    """Advantages of one sample's tokens under mask 1, by the definition."""
    on = np.flatnonzero(mask)
    advantages, following, next_value = {}, 0.0, at_end
    for t in on[::-1]:
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t], next_value = following, values[t]
    return advantages
