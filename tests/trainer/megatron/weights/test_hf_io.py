"""HF checkpoints through Megatron and back, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vime.errors import ConfigError
from vime.trainer.megatron.weights import hf_io


def assert_same_checkpoint(a, b):
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
    with safe_open(b / "model.safetensors", framework="pt") as f:
        assert f.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_round_trip_is_bit_identical(model_folder, make_trainer, tmp_path, kind, tied, dtype):
    folder, _ = model_folder(kind, tied=tied, dtype=dtype)
    make_trainer(folder).export_hf(tmp_path / "out")
    assert_same_checkpoint(folder, tmp_path / "out")


def test_a_padded_vocabulary_comes_back_unpadded_and_changes_no_log_prob(
    model_folder, make_trainer, make_batch, tmp_path
):
    folder, _ = model_folder(tied=False)
    batch = make_batch([9, 5])
    want = make_trainer(folder).log_probs(batch)
    trainer = make_trainer(folder, megatron={"make_vocab_size_divisible_by": 64})
    assert trainer._policy.chunks[0].output_layer.weight.shape[0] == 64
    assert (trainer.log_probs(batch)[1:9] == want[1:9]).all()
    trainer.train(batch)
    trainer.export_hf(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape[0] == 61


def test_the_export_carries_config_and_tokenizer_files_and_loads_in_transformers(model_folder, make_trainer, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, model = model_folder("llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    make_trainer(folder, megatron={"bf16": True}).export_hf(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "chat_template.jinja").exists()
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.bfloat16(), b), name


def test_large_models_are_written_in_shards_and_read_from_them(model_folder, make_trainer, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    folder, model = model_folder("qwen3", tied=False)
    monkeypatch.setattr(hf_io, "MAX_SHARD_BYTES", 40_000)
    make_trainer(folder).export_hf(tmp_path / "out")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    monkeypatch.undo()
    make_trainer(tmp_path / "out").export_hf(tmp_path / "again")
    assert_same_checkpoint(folder, tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks 1 tensor model\.norm\.weight"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(1)}), r"model\.extra\.weight, of no known place"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight \[3\], not \[48\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor_name(model_folder, make_trainer, change, word):
    folder, _ = model_folder()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=word):
        make_trainer(folder)


def test_a_folder_without_safetensors_is_refused(model_folder, make_trainer):
    folder, _ = model_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="neither model"):
        make_trainer(folder)


def test_an_export_is_as_readable_as_any_file(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    hf_io.export_hf(iter([("a.weight", torch.ones(2))]), source, tmp_path / "out", dtype=torch.float32)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert set(modes) == {"config.json", "model.safetensors"} and len(set(modes.values())) == 1
