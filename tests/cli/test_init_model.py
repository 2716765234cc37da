"""The tiny model: its size, its tokenizer's round trip, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vime.cli.init_model import init_model, make_tokenizer
from vime.cli.main import main
from vime.cli.tiny_model import FAMILIES, HEAD_SIZES, TinyModel
from vime.config.hf import read_model_config
from vime.errors import ConfigError
from vime.models import FAMILIES as SUPPORTED
from vime.models import family_of
from vime.models.parameters import parameters


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


def test_every_family_can_be_made() -> None:
    assert set(FAMILIES) == {family.model_type for family in SUPPORTED}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_made_is_read_as_what_was_asked_for(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "model"
    size = init_model(out, TinyModel(family=family, num_layers=2))
    config = read_model_config(str(out))
    settings = family_of(config).settings(config)
    assert parameters(settings).total == size == AutoModelForCausalLM.from_pretrained(out).num_parameters()
    names = set(load_file(out / "model.safetensors"))
    assert names == set(family_of(config).name_map(settings).hf_names())
    experts = [settings.has_experts(i) for i in range(2)]
    assert experts == {"qwen3_moe": [True, True], "glm4_moe": [False, True]}.get(family, [False, False])
    if any(experts):
        assert (settings.transformer["num_moe_experts"], settings.transformer["moe_router_topk"]) == (8, 2)


def test_glm_with_layers_of_multi_token_prediction_behind_the_last(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name, layers in (("with", 2), ("without", 0)):
        init_model(tmp_path / name, TinyModel(family="glm4_moe", num_layers=2, num_mtp_layers=layers))
    tensors, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    config = read_model_config(str(tmp_path / "with"))
    names = family_of(config).name_map(family_of(config).settings(config))
    extra = tensors.keys() - plain.keys()
    assert all(names.is_kept(name) for name in extra) and set(names.hf_names()) == plain.keys()
    assert {"model.layers.2.enorm.weight", "model.layers.3.mlp.experts.7.up_proj.weight"} <= extra
    assert tensors["model.layers.3.eh_proj.weight"].shape == (128, 256)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "with").num_parameters() > 0


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"family": "qwen2", "num_heads": 2, "num_kv_heads": 2}, "head_dim is 32"),
        ({"family": "glm4_moe", "tie_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_experts": 4}, "--num-experts is given, but --family qwen3"),
        ({"family": "qwen3_moe", "num_mtp_layers": 1}, "--num-mtp-layers is given, but --family qwen3_moe"),
        ({"family": "qwen3_moe", "experts_per_token": 9}, "from 2 to --num-experts 8"),
        ({"family": "glm4_moe", "num_dense_layers": 4}, "--num-dense-layers is 4"),
        ({"family": "glm4_moe", "num_shared_experts": 0}, "--num-shared-experts is 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(tmp_path: Path, shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        init_model(tmp_path / "m", TinyModel(**shape))


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


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("{0}/new", "--seed", "-1"), 2, "--seed is -1, but must be at least 0"),
        (("{0}/new", "--seed", str(2**64)), 2, "below 2^64"),
        (("{0}/new", "--num-layers", "10000", "--ffn-size", "1000000"), 2, "parameters is made in"),
        (("{0}/new", "--ffn-size", str(2**40)), 2, "and at most 2147483647"),
        (("{0}/file/new",), 1, "Not a directory"),
        (("{0}/" + "x" * 300,), 1, "File name too long"),
    ],
)
def test_what_cannot_be_made_is_one_line(tmp_path: Path, capsys: Any, words: Any, code: int, message: str) -> None:
    (tmp_path / "file").touch()
    assert main(["init-model", *(word.format(tmp_path) for word in words)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vime: ") and message in line
