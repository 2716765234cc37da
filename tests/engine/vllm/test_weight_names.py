from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vime.engine.vllm.weight_names import WeightLedger, checkpoint_names
from vime.errors import ConfigError

CONFIG = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=True)
REQUIRED = frozenset({"a", "b"})


def test_names_of_a_checkpoint_without_what_is_no_part_of_the_policy(tmp_path: Path) -> None:
    policy = {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        *(f"model.layers.1.mlp.experts.{i}.{part}_proj.weight" for i in range(2) for part in ("gate", "up", "down")),
    }
    others = {
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        # a multi-token prediction layer
        "model.layers.2.mlp.experts.0.up_proj.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.shared_head.head.weight",
    }
    save_file({name: torch.zeros(1) for name in policy | others | {"lm_head.weight"}}, tmp_path / "model.safetensors")
    assert checkpoint_names(str(tmp_path), CONFIG) == policy
    untied = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=False)
    assert checkpoint_names(str(tmp_path), untied) == policy | {"lm_head.weight"}


def test_an_index_and_its_files_give_the_names_together(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: f"{name}.safetensors" for name in REQUIRED}})
    )
    for name in REQUIRED:
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    assert checkpoint_names(str(tmp_path), CONFIG) == REQUIRED
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no b\.safetensors"):
        checkpoint_names(str(tmp_path), CONFIG)


def test_a_folder_without_safetensors_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert checkpoint_names(str(tmp_path), CONFIG) is None


def test_the_announced_names_must_be_the_checkpoints() -> None:
    assert WeightLedger(["b", "a"], REQUIRED).announcement_problem() is None
    assert "missing: b" in str(WeightLedger(["a"], REQUIRED).announcement_problem())
    assert "unexpected: c" in str(WeightLedger(["a", "b", "c"], REQUIRED).announcement_problem())
    assert "twice: a" in str(WeightLedger(["a", "b", "a"], REQUIRED).announcement_problem())
    assert "no names" in str(WeightLedger([], None).announcement_problem())
    assert WeightLedger(["a"], None).announcement_problem() is None


def test_each_announced_name_must_come_exactly_once() -> None:
    ledger = WeightLedger(["a", "b"], REQUIRED)
    assert ledger.receive(["a"]) is None
    assert "missing: b" in str(ledger.completion_problem())
    assert "twice: a" in str(ledger.receive(["b", "a"]))
    assert "not among the announced names: c" in str(ledger.receive(["c"]))
    assert WeightLedger(["a"], None).receive(["a", "a"]) == "received twice: a"
