"""HF checkpoints to training checkpoints and back without a model, against what a trainer writes and reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.conftest import SMALL, write_model
from vime.config import AlgoConfig, CheckpointConfig
from vime.errors import ConfigError
from vime.trainer.megatron.checkpoints import convert
from vime.trainer.megatron.checkpoints.stored_tensors import StoredTensors
from vime.trainer.megatron.weights import hf_io

BARE = CheckpointConfig(no_save_optim=True, finetune=True)


def write_moe(folder, kind, dtype):
    """Three layers with eight experts each; of GLM-4.5, the first is dense, and one for other uses comes behind."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    sizes = {**SMALL, "num_hidden_layers": 3, "head_dim": 32, "tie_word_embeddings": False, "initializer_range": 0.1}
    experts = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_experts=8, norm_topk_prob=True))
    else:
        more = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        bias = {
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        }
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **experts, **more, **bias))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-1, 1)
    model.to(dtype).save_pretrained(folder)
    if kind == "glm4_moe":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.3.eh_proj.weight"] = torch.randn(48, 96).to(dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(params=["llama", "qwen3-tied", "qwen3-bf16", "qwen3_moe", "qwen3_moe-bf16", "glm4_moe"], scope="module")
def source(request, tmp_path_factory):
    kind, _, how = request.param.partition("-")
    folder = tmp_path_factory.mktemp("models") / request.param
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    if "moe" in kind:
        write_moe(folder, kind, dtype)
    else:
        write_model(folder, kind, tied=how == "tied", dtype=dtype)
    return folder


def contents(folder):
    """Of an HF checkpoint."""
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    assert all(got[n].dtype == want[n].dtype and torch.equal(got[n], want[n]) for n in want)


def table(folder):
    stored = StoredTensors(folder)
    return {key: (stored.shape(key), stored.dtype(key)) for key in stored}


def test_a_conversion_holds_what_a_trainer_would_have_saved_and_a_trainer_loads_it(source, make_trainer, tmp_path):
    done = convert.to_training(source, tmp_path / "converted")
    trainer = make_trainer(source, checkpoint=BARE)
    trainer.save(tmp_path / "saved")
    assert table(tmp_path / "converted") == table(tmp_path / "saved")
    ours, theirs = StoredTensors(tmp_path / "converted"), StoredTensors(tmp_path / "saved")
    assert all(torch.equal(ours.read(key), theirs.read(key)) for key in ours)
    with torch.no_grad():
        for parameter in trainer._policy.ddps[0].module.parameters():
            parameter.zero_()
    trainer.load(tmp_path / "converted")
    want = contents(source)
    assert_same(
        {n: t.clone() for n, t in trainer._hf_tensors()},
        {n: t for n, t in want.items() if not n.startswith("model.layers.3.")},
    )
    assert done.num_tensors == len(list(trainer._hf_tensors()))


def test_there_and_back_is_bit_identical_also_over_several_files(source, tmp_path, monkeypatch):
    convert.to_training(source, tmp_path / "converted")
    monkeypatch.setattr(hf_io, "MAX_SHARD_BYTES", 30_000)
    done = convert.to_hf(tmp_path / "converted", source, tmp_path / "hf")
    assert_same(contents(tmp_path / "hf"), contents(source))
    assert done.num_tensors == len(contents(source))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3 and index["metadata"]["total_size"] == done.num_bytes


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_an_export_of_a_trained_checkpoint_is_the_trainers_own(source, make_trainer, make_batch, tmp_path, estimator):
    """A critic in the checkpoint is left there."""
    algo = AlgoConfig(advantage_estimator=estimator)
    trainer = make_trainer(source, algo=algo, megatron={"lr": 1e-2, "make_vocab_size_divisible_by": 64})
    trainer.train(make_batch([9, 4, 17, 6]))
    trainer.save(tmp_path / "saved")
    trainer.export_hf(tmp_path / "exported")
    convert.to_hf(tmp_path / "saved", source, tmp_path / "hf")
    assert_same(contents(tmp_path / "hf"), contents(tmp_path / "exported"))
    read = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "exported")]
    assert read[0] == read[1]


def test_the_dtype_can_be_another_and_routers_biases_stay_in_float32(tmp_path):
    write_moe(tmp_path / "glm", "glm4_moe", torch.float32)
    convert.to_training(tmp_path / "glm", tmp_path / "half", dtype=torch.bfloat16)
    convert.to_hf(tmp_path / "half", tmp_path / "glm", tmp_path / "hf")
    want, got = contents(tmp_path / "glm"), contents(tmp_path / "hf")
    kept = {n for n in want if n.endswith("e_score_correction_bias") or n.startswith("model.layers.3.")}
    assert len(kept) == 3
    assert_same(got, {n: t if n in kept else t.bfloat16() for n, t in want.items()})
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_another_model_and_damage_are_named(model_folder, tmp_path):
    qwen, _ = model_folder("qwen3", tied=False)
    llama, _ = model_folder("llama", tied=False)
    convert.to_training(qwen, tmp_path / "ck")
    with pytest.raises(ConfigError, match=r"has 2 tensors that this model has not, among them .*k_layernorm"):
        convert.to_hf(tmp_path / "ck", llama, tmp_path / "hf")
    file = tmp_path / "ck" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"__0_0.distcp is damaged: .* cannot be read"):
        convert.to_hf(tmp_path / "ck", qwen, tmp_path / "hf")
    (tmp_path / "ck" / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a training checkpoint, or is damaged"):
        convert.to_hf(tmp_path / "ck", qwen, tmp_path / "other")
