"""What several benchmarks need: models of random weights, and lines of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def write_checkpoint(
    folder: Path, config: dict[str, Any], *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> int:
    """A checkpoint of random weights, drawn on the device. Args: config: HF's. Returns: its number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    hf = AutoConfig.for_model(settings.pop("model_type"), **settings)
    hf.architectures = config["architectures"]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf, dtype=dtype)
    model.save_pretrained(folder)
    size = sum(p.numel() for p in model.parameters())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # an engine measures what is free
    return size


def say(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as a line of JSON, and append it to `out` if there is one."""
    line = json.dumps(result)
    print(line, flush=True)
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
