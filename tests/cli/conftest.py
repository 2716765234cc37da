"""A tiny checkpoint's config, prompts and names of tensors: all that resolving settings reads."""

import json
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest

from vime.models import family_of


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros in float32, which takes no room on the disk."""
    head, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 100,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    family = family_of(config)
    write_weights(folder / "model.safetensors", family.name_map(family.settings(config)).shapes())
    return folder


@pytest.fixture
def argv(tmp_path: Path, checkpoint: Path) -> list[str]:
    """The shortest command line that is right."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(8)))
    return [
        *("--platform", "cpu", "--hf-checkpoint", str(checkpoint), "--prompt-data", str(prompts)),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-rollout", "1", "--lr", "1e-4"),
        *(
            "--rm-type",
            "exact_match",
            "--label-key",
            "label",
            "--rollout-max-response-len",
            "8",
            "--run-dir",
            str(tmp_path / "run"),
        ),
    ]
