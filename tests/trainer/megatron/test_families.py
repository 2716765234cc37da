"""Every family against transformers: log-probs, gradients, checkpoints in and out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.families import KINDS
from vime.cli.tiny_model import add_mtp_layers
from vime.config import AlgoConfig, RolloutConfig
from vime.errors import ConfigError
from vime.trainer.megatron.weights import shards

LENGTHS = [9, 4, 37, 6, 5, 12, 8, 7]


@pytest.fixture(params=KINDS)
def kind(request):
    """Each kind of model in turn."""
    return request.param


def hf_gradients(trainer):
    """The gradient of the last step, by HF name."""
    names, model = trainer._names, trainer._model
    gradients = {}
    for name, parameter in shards.named_parameters(trainer._policy.chunks, tied=model.tie_word_embeddings):
        if parameter.requires_grad:
            entry = names.to_hf(name)
            parts = shards.split(parameter.main_grad, entry, model)
            gradients.update((n, p.clone()) for n, p in zip(entry.hf, parts, strict=True))
    return gradients


def by_expert(name, gradient):
    """A gradient of transformers by the names in checkpoints: it has a layer's experts in one tensor."""
    prefix, _, last = name.rpartition(".")
    if last not in ("gate_up_proj", "down_proj") or not prefix.endswith("experts"):
        return {name: gradient}
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
    return {
        f"{prefix}.{e}.{part}.weight": rows
        for e, expert in enumerate(gradient)
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True)
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_log_probs_and_gradients_are_those_of_transformers(
    model_folder, make_trainer, make_batch, hf_log_probs, kind, tied
):
    if tied and kind.startswith("glm"):
        pytest.skip("GLM's head is never tied")
    folder, model = model_folder(kind, tied=tied)
    batch = make_batch(LENGTHS, micro=3)
    trainer = make_trainer(
        folder,
        algo=AlgoConfig(loss_type="sft_loss"),
        rollout=RolloutConfig(rollout_temperature=0.7),
        megatron={"clip_grad": 0.0, "make_vocab_size_divisible_by": 64},
    )
    want = hf_log_probs(model, batch, 0.7)
    np.testing.assert_allclose(trainer.log_probs(batch), want, atol=1e-5, rtol=0)
    trainer.train(batch)
    ours = hf_gradients(trainer)
    loss = 0.0
    for i in range(batch.num_samples):
        rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        ids = torch.from_numpy(batch.tokens[rows].astype(np.int64))[None]
        log_p = torch.log_softmax(model(ids).logits[0, :-1] / 0.7, -1).gather(1, ids[0, 1:, None])[:, 0]
        loss = loss - (torch.from_numpy(batch.loss_weights[rows][1:]) * log_p).sum()
    loss.backward()
    theirs = {n: g for name, p in model.named_parameters() for n, g in by_expert(name, p.grad).items()}
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        got = ours[name][: len(want)]  # without the padding of the vocabulary
        assert want.norm() > 0 or ".experts." in name  # an expert may get no token
        assert (got - want).norm() <= 1e-5 * want.norm() + 1e-8, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_comes_back_bit_for_bit_under_the_names_it_had(model_folder, make_trainer, tmp_path, kind, dtype):
    folder, _ = model_folder(kind, tied=dtype == torch.bfloat16, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    trainer = make_trainer(folder)
    assert set(trainer.weight_names()) == set(tensors)
    trainer.export_hf(tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == out[name].dtype and torch.equal(tensor, out[name]), name


@pytest.fixture
def glm_with_mtp(model_folder):
    """A bfloat16 GLM with a layer of multi-token prediction behind its last."""
    folder, model = model_folder("glm4_moe", tied=False, dtype=torch.bfloat16)
    add_mtp_layers(folder, num_layers=2, num_mtp_layers=1)
    return folder, model


def test_layers_of_multi_token_prediction_stay_as_they_are_while_the_rest_is_trained(
    glm_with_mtp, make_trainer, make_batch, tmp_path
):
    folder, model = glm_with_mtp
    trainer = make_trainer(folder, megatron={"bf16": False, "lr": 0.1})
    assert set(trainer.weight_names()) == model_names(model)
    trainer.train(make_batch(LENGTHS))
    trainer.export_hf(tmp_path / "out")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert before.keys() == after.keys() and set(trainer.weight_names()) < before.keys()
    for name, tensor in before.items():
        if name in trainer.weight_names():
            # The correction bias is no parameter: nothing trains it.
            assert torch.equal(tensor.float(), after[name]) == name.endswith("e_score_correction_bias"), name
        else:
            assert after[name].dtype == tensor.dtype and torch.equal(tensor, after[name]), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def model_names(model):
    """The names of a transformers model's tensors as in its checkpoints."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n for name, t in tensors.items() if "rotary" not in name for n in by_expert(name, t)}


def test_tensors_behind_the_last_layer_are_refused_unless_the_config_announces_them(glm_with_mtp, make_trainer):
    folder, _ = glm_with_mtp
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"model\.layers\.2.* of no known place"):
        make_trainer(folder)
