"""The tiny model: its size, its tokenizer's round trip, and what it refuses."""

import json
from pathlib import Path

import pytest

from vime.cli.init_model import HEAD_SIZES, TinyModel, init_model, make_tokenizer
from vime.cli.main import main
from vime.config.hf import read_model_config
from vime.errors import ConfigError
from vime.models import family_of


def test_the_default_is_a_small_qwen3_that_transformers_and_vime_read(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "model"
    assert init_model(out, TinyModel()) == 813_440
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(model).__name__ == "Qwen3ForCausalLM" and str(model.dtype) == "torch.float32"
    assert model.config.vocab_size == len(tokenizer) == 100
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    settings = family_of(read_model_config(str(out))).settings(read_model_config(str(out)))
    assert settings.transformer["num_layers"] == 4 and settings.vocab_size == 100


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_model(tmp_path / name, TinyModel(num_layers=1, ffn_size=32, seed=seed))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_llama_with_tied_embeddings_in_bfloat16(tmp_path: Path) -> None:
    out = tmp_path / "model"
    init_model(out, TinyModel(family="llama", tie_embeddings=True, dtype="bfloat16", vocab="bytes"))
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16" and config["vocab_size"] == 260


@pytest.mark.parametrize(
    ("vocab", "text"),
    [
        ("chars", "27 + 68 = 95\nA b?  ~"),
        ("bytes", "27 + 68 = 95\nÄ 中 \t\U0001f600 "),
    ],
)
def test_tokenizers_round_trip_and_use_single_units(vocab: str, text: str) -> None:
    tokenizer = make_tokenizer(vocab, 64)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode() if vocab == "bytes" else text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"


def test_a_head_size_that_engines_do_not_take_is_refused_with_those_they_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        init_model(tmp_path / "m", TinyModel(head_size=16, num_kv_heads=3))
    assert len(caught.value.problems) == 2
    assert all(str(size) in caught.value.problems[0] for size in HEAD_SIZES)


def test_only_its_own_folders_are_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    small = ["--num-layers", "1", "--ffn-size", "32"]
    assert main(["init-model", str(mine), *small]) == 0
    assert main(["init-model", str(mine), *small, "--seed", "3"]) == 0
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert main(["init-model", str(other), *small]) == 2
    assert "give another folder" in capsys.readouterr().err
    assert (other / "config.json").read_text() == "{}"
