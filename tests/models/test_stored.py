"""Which tensors a checkpoint must hold: the table of shapes, and what is said of files that differ from it."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from tests.models.test_families import CONFIGS, GLM, QWEN3, QWEN3_MOE
from vime.config.hf import read_model_config
from vime.config.hf_weights import StoredTensor
from vime.errors import ConfigError
from vime.models import family_of
from vime.models.names import CORRECTION_BIAS, Rule, shapes_of
from vime.models.parameters import parameters
from vime.models.stored import checked_weights, dtype_problem, head_problem, weight_problems

FOLDER = Path("model")
PUBLISHED = sorted(Path("scripts/models").iterdir())


def tensors_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> dict[str, StoredTensor]:
    return {name: StoredTensor(FOLDER / "x", dtype, shape, 0, 4 * prod(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("hf", CONFIGS.values(), ids=CONFIGS)
def test_the_table_of_every_family_has_as_many_numbers_as_its_parameters(hf) -> None:
    settings = family_of(hf).settings(hf)
    names = family_of(hf).name_map(settings)
    assert list(names.shapes()) == names.hf_names()
    counted = sum(prod(shape) for name, shape in names.shapes().items() if not name.endswith(CORRECTION_BIAS))
    assert counted == parameters(settings).total


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_the_table_of_published_models_has_as_many_numbers_as_their_parameters(folder: Path) -> None:
    hf = read_model_config(str(folder))
    settings = family_of(hf).settings(hf)
    shapes = family_of(hf).name_map(settings).shapes()
    counted = sum(prod(shape) for name, shape in shapes.items() if not name.endswith(CORRECTION_BIAS))
    assert counted == parameters(settings).total


def test_each_kind_of_tensor_has_its_shape() -> None:
    settings = family_of(GLM).settings(GLM)
    names = family_of(GLM).name_map(settings)
    shapes, layer = names.shapes(), "model.layers.1."
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (64, 48)
    assert shapes[layer + "self_attn.q_proj.weight"] == (128, 48) and shapes[layer + "self_attn.q_proj.bias"] == (128,)
    assert shapes[layer + "self_attn.v_proj.weight"] == (64, 48) and shapes[layer + "self_attn.k_proj.bias"] == (64,)
    assert shapes[layer + "self_attn.o_proj.weight"] == (48, 128) and shapes[layer + "self_attn.q_norm.weight"] == (32,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (48, 96)
    assert shapes[layer + "mlp.gate.weight"] == (4, 48) and shapes[layer + "mlp.gate.e_score_correction_bias"] == (4,)
    assert shapes[layer + "mlp.experts.3.up_proj.weight"] == (32, 48)
    assert shapes[layer + "mlp.experts.3.down_proj.weight"] == (48, 32)
    assert shapes[layer + "mlp.shared_experts.gate_proj.weight"] == (64, 48)
    assert not any(name.startswith("model.layers.3.") for name in shapes)
    kept = names.kept_shapes()
    assert kept["model.layers.3.eh_proj.weight"] == (48, 96) and kept["model.layers.3.hnorm.weight"] == (48,)
    assert kept["model.layers.3.shared_head.head.weight"] == (64, 48)
    assert kept["model.layers.3.mlp.experts.0.up_proj.weight"] == (32, 48)


def test_a_rule_gives_one_shape_to_all_its_tensors_or_each_its_own() -> None:
    assert list(shapes_of(Rule("m", ("a", "b"), ((1,),)))) == [("a", (1,)), ("b", (1,))]
    assert list(shapes_of(Rule("m", ("a", "b"), ((1,), (2,))))) == [("a", (1,)), ("b", (2,))]
    with pytest.raises(ValueError, match="zip"):
        list(shapes_of(Rule("m", ("a",), ((1,), (2,)))))


def problems(hf, change: Callable[[dict[str, StoredTensor]], object]) -> list[str]:
    settings = family_of(hf).settings(hf)
    names = family_of(hf).name_map(settings)
    tensors = tensors_of({**names.shapes(), **names.kept_shapes()})
    assert not list(weight_problems(FOLDER, tensors, names, settings))
    change(tensors)
    return list(weight_problems(FOLDER, tensors, names, settings))


def put(name: str, shape: tuple[int, ...], dtype: str = "F32") -> Callable[[dict[str, StoredTensor]], object]:
    return lambda tensors: tensors.update({name: StoredTensor(FOLDER / "x", dtype, shape, 0, 0)})


@pytest.mark.parametrize("expert", [0, 3])
@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((32, 47), "F32", "up_proj.weight [32, 47], not [32, 48]"),
        ((48, 32), "BF16", "up_proj.weight [48, 32], not [32, 48]"),
        ((), "F32", "up_proj.weight [], not [32, 48]"),
        ((32, 48), "I8", "up_proj.weight I8: only F32, BF16, F16 can"),
        ((32, 48), "F8_E4M3", "up_proj.weight F8_E4M3: only F32, BF16, F16 can"),
        ((32, 48), "F64", "up_proj.weight F64: only F32, BF16, F16 can"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(expert: int, shape, dtype: str, words: str) -> None:
    (problem,) = problems(QWEN3_MOE, put(f"model.layers.2.mlp.experts.{expert}.up_proj.weight", shape, dtype))
    assert words in problem and "1 tensor" in problem


@pytest.mark.parametrize(
    ("hf", "change", "words"),
    [
        (
            QWEN3_MOE,
            lambda t: t.pop("lm_head.weight"),
            "lm_head.weight; for a head that is the embedding, say",
        ),
        (QWEN3_MOE, lambda t: t.pop("model.norm.weight"), "lacks 1 tensor model.norm.weight; config.json"),
        (QWEN3_MOE, put("model.layers.0.mlp.experts.4.up_proj.weight", (32, 48)), "of no known place"),
        (QWEN3_MOE, put("model.layers.4.mlp.gate.weight", (4, 48)), "of no known place"),
        (QWEN3_MOE, put("score.weight", (1, 48)), "has 1 tensor score.weight, of no known place"),
        (QWEN3, put("lm_head.weight", (63, 48)), "lm_head.weight [63, 48], not [64, 48]"),
        (QWEN3, put("lm_head.weight", (64, 48), "I8"), "lm_head.weight I8"),
        (GLM, put("model.layers.3.eh_proj.weight", (48, 48)), "eh_proj.weight [48, 48], not [48, 96]"),
        (GLM, put("model.layers.4.eh_proj.weight", (48, 96)), "of no known place"),
        (GLM, put("model.layers.1.mlp.gate.e_score_correction_bias", (5,)), "correction_bias [5], not [4]"),
    ],
)
def test_what_is_missing_or_of_no_known_place_is_named(hf, change, words: str) -> None:
    (problem,) = problems(hf, change)
    assert words in problem


@pytest.mark.parametrize(
    ("hf", "change"),
    [
        (QWEN3, put("lm_head.weight", (64, 48))),
        (QWEN3, put("model.layers.1.self_attn.rotary_emb.inv_freq", (16,))),
        (QWEN3, put("model.rotary_emb.inv_freq", (16,), "I64")),
        (GLM, put("model.layers.3.something.new", (7,), "U8")),
        (GLM, put("model.layers.3.eh_proj.weight", (48, 96), "F8_E4M3")),
        (GLM, lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.3.")]),
    ],
)
def test_what_does_no_harm_is_accepted(hf, change) -> None:
    assert problems(hf, change) == []


def test_weights_must_have_the_dtype_that_config_json_states() -> None:
    names = family_of(GLM).name_map(family_of(GLM).settings(GLM))
    tensors = tensors_of({**names.shapes(), **names.kept_shapes()}, "BF16")
    put("model.layers.1.mlp.gate.e_score_correction_bias", (4,), "F32")(tensors)
    put("model.layers.3.eh_proj.weight", (48, 96), "F32")(tensors)
    assert dtype_problem(FOLDER, tensors, names, "bfloat16", remedy="do this") is None
    problem = dtype_problem(FOLDER, tensors, names, "float32", remedy="do this")
    assert problem is not None and "config.json says float32, but its tensors are " in problem
    assert problem.endswith("bfloat16 (such as model.embed_tokens.weight); do this, or correct config.json")
    put("model.norm.weight", (48,), "F32")(tensors)
    problem = dtype_problem(FOLDER, tensors, names, "bfloat16", remedy="do this")
    assert problem is not None and ", 1 float32 (such as model.norm.weight)" in problem


def test_a_tied_models_own_head_must_be_its_embedding(tmp_path: Path) -> None:
    path, size = tmp_path / "x", 9_000_001  # over several reads, the last of them short
    path.write_bytes(bytes(2 * size))
    settings = family_of(QWEN3).settings(QWEN3)
    tensors = {
        "model.embed_tokens.weight": StoredTensor(path, "U8", (size,), 0, size),
        "lm_head.weight": StoredTensor(path, "U8", (size,), size, size),
    }
    assert head_problem(tmp_path, tensors, settings) is None
    with path.open("r+b") as file:
        file.seek(2 * size - 1)
        file.write(b"\1")
    problem = head_problem(tmp_path, tensors, settings)
    assert problem is not None and "lm_head.weight is there and differs from model.embed_tokens.weight" in problem
    assert head_problem(tmp_path, tensors, replace(settings, tie_word_embeddings=False)) is None
    other = {**tensors, "lm_head.weight": replace(tensors["model.embed_tokens.weight"], dtype="I8")}
    assert head_problem(tmp_path, other, settings) is not None
    path.unlink()
    problem = head_problem(tmp_path, tensors, settings)
    assert problem is not None and "cannot be read" in problem


def test_checked_weights_say_everything_at_once(tmp_path: Path) -> None:
    settings = family_of(QWEN3).settings(QWEN3)
    names = family_of(QWEN3).name_map(settings)
    head = b'{"model.norm.weight": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0")
    with pytest.raises(ConfigError) as caught:
        checked_weights(tmp_path, names, settings)
    lacks, shape, dtype = caught.value.problems
    assert "lacks 23 tensors" in lacks and "[1], not [48]" in shape and "model.norm.weight I8" in dtype
