"""Routing replay on one process: against transformers with the same experts, and bit for bit against itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.critics import write_critic
from tests.trainer.megatron.routed import force, own_experts
from tests.trainer.megatron.routed_experts import random_experts, some_known
from vime.config import AlgoConfig, CriticConfig, TrainConfig
from vime.errors import TrainingError
from vime.types import RoutedExperts

LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]
SGD_LIKE = {"adam_eps": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}  # an update proportional to the gradient
DIFFERS = "train/routing_replay_differs"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTE = {
    "nothing": {},
    "full": FULL,
    "moe": {**SELECTIVE, "recompute_modules": ["moe", "layernorm"]},
    "inside experts": {**SELECTIVE, "recompute_modules": ["moe_act", "core_attn"]},
}


def with_rows(batch, kind, **kwargs):
    sizes = {"experts": 4 if kind.endswith("mixed") else 8, "top_k": 4 if kind.endswith("groups") else 2}
    return replace(batch, routed_experts=random_experts(batch, layers=2, **sizes, **kwargs))


def rows_of(batch, i):
    routed = batch.routed_experts
    return routed.rows[routed.starts[i] : routed.starts[i + 1]]


def gradient_of(trainer):
    return torch.cat([p.main_grad.flatten() for p in trainer._policy.chunks[0].parameters()]).clone()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_moe-mixed", "glm4_moe", "glm4_moe-groups"])
def test_log_probs_are_those_of_transformers_with_the_same_experts(model_folder, make_trainer, make_batch, kind):
    folder, model = model_folder(kind, tied=False, seed=1)
    plain = make_batch(LENGTHS, micro=3)
    batch = with_rows(plain, kind, known=some_known(plain))
    trainer = make_trainer(folder)
    got, free = trainer.log_probs(batch), trainer.log_probs(plain)
    for i, (start, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        force(model, rows_of(batch, i))
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(got[start + 1 : end], log_p.numpy(), atol=2e-5, rtol=0)
        elsewhere = np.abs(got[start + 1 : end] - free[start + 1 : end]).max() > 1e-2
        assert elsewhere == bool(batch.routed_experts.known[i])


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_gradients_are_those_of_transformers_with_the_same_experts(model_folder, make_trainer, make_batch, kind):
    folder, model = model_folder(kind, tied=False, seed=1)
    plain = make_batch(LENGTHS, micro=3)
    batch = with_rows(plain, kind, known=some_known(plain))
    trainer = make_trainer(folder, algo=AlgoConfig(loss_type="sft_loss"), megatron={**SGD_LIKE, **FULL})
    before = {name: tensor.clone() for name, tensor in trainer._hf_tensors()}
    trainer.train(batch)
    after = dict(trainer._hf_tensors())
    total = 0.0
    for i in range(batch.num_samples):
        force(model, rows_of(batch, i))
        places = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        ids = torch.from_numpy(batch.tokens[places].astype(np.int64))[None]
        log_p = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        total = total - (torch.from_numpy(batch.loss_weights[places][1:]) * log_p).sum()
    total.backward()
    routers = 0
    for name, p in model.named_parameters():
        if name in before:  # experts are fused there; their gradients reach the layers before
            step = (before[name] - after[name]) / 1e-3
            torch.testing.assert_close(step, p.grad / (p.grad.abs() + 1), atol=2e-4, rtol=1e-3, msg=name)
            routers += name.endswith("gate.weight") and bool(p.grad.any())
    assert routers == {"qwen3_moe": 2, "glm4_moe": 1}[kind]


@pytest.mark.parametrize(
    ("kind", "recompute"), [*(("qwen3_moe", recompute) for recompute in RECOMPUTE), ("glm4_moe", "full")]
)
def test_replaying_the_own_choice_changes_no_bit(model_folder, make_trainer, make_batch, kind, recompute):
    folder, _ = model_folder(kind, tied=False)
    batch = make_batch(LENGTHS, micro=2)

    def train(routed):
        trainer = make_trainer(folder, megatron=RECOMPUTE[recompute])
        given = replace(batch, routed_experts=own_experts(trainer, batch)) if routed else batch
        return trainer.train(given), gradient_of(trainer)

    (free, free_gradient), (replayed, gradient) = train(False), train(True)
    assert replayed["train/loss"] == free["train/loss"] and replayed["train/grad_norm"] == free["train/grad_norm"]
    assert torch.equal(gradient, free_gradient)
    assert replayed[DIFFERS] == 0 and DIFFERS not in free


@pytest.mark.parametrize("recompute", [r for r in RECOMPUTE if r != "nothing"])
def test_what_is_computed_again_replays_the_same_experts(model_folder, make_trainer, make_batch, recompute):
    folder, _ = model_folder("qwen3_moe", tied=False)
    batch = with_rows(make_batch(LENGTHS, micro=2), "qwen3_moe")

    def train(megatron):
        trainer = make_trainer(folder, megatron=megatron)
        metrics = trainer.train(batch)
        return metrics["train/loss"], metrics[DIFFERS], gradient_of(trainer)

    (loss, differs, gradient), (again, still, other) = train({}), train(RECOMPUTE[recompute])
    assert loss == again and differs == still > 0.5  # one in 28 random pairs is the router's
    torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-5)


def test_the_share_of_tokens_that_would_go_elsewhere_is_counted_by_layer(model_folder, make_trainer, make_batch):
    folder, _ = model_folder("glm4_moe", tied=False)
    batch = make_batch(LENGTHS, micro=3, steps=2)
    trainer = make_trainer(folder)
    own = own_experts(trainer, batch)
    rows = own.rows.copy()
    rows[:, 1] = rows[:, 1, ::-1]  # the same experts in another order
    for token in (0, 30):
        rows[token, 1, 0] = next(e for e in range(8) if e not in rows[token, 1])
    metrics = trainer.train(replace(batch, routed_experts=RoutedExperts(rows, own.known)))
    assert metrics[f"{DIFFERS}/layer_1"] == metrics[DIFFERS] == 2 / len(rows)
    assert f"{DIFFERS}/layer_0" not in metrics  # dense


def test_steps_replay_what_the_old_policy_chose(model_folder, make_trainer, make_batch):
    folder, _ = model_folder("qwen3_moe", tied=False)
    batch = make_batch(LENGTHS, micro=2, steps=2)
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.05)

    def train(records=False, with_engine=False):
        train = TrainConfig(use_routing_replay=records)
        trainer = make_trainer(folder, algo=algo, train=train, megatron={"lr": 3e-2, **FULL})
        given = replace(batch, routed_experts=own_experts(trainer, batch)) if with_engine else batch
        return trainer.train(given), gradient_of(trainer)

    free, recorded, given = train(), train(records=True), train(with_engine=True)
    assert not torch.equal(free[1], recorded[1]), "no token changed its experts in the first step"
    assert torch.equal(recorded[1], given[1])
    same = {name for name in recorded[0] if name.startswith(("train/", "rollout/"))}
    assert {n: recorded[0][n] for n in same} == {n: v for n, v in given[0].items() if n in same}
    assert recorded[0]["train/kl_loss"] != 0  # the reference's routers are free, and those of other weights


def test_steps_replay_the_engines_rows_and_for_other_tokens_what_the_old_policy_chose(
    model_folder, make_trainer, make_batch
):
    folder, _ = model_folder("qwen3_moe", tied=False)
    plain = make_batch(LENGTHS, micro=2, steps=2)
    partly = with_rows(plain, "qwen3_moe", known=some_known(plain))

    def train(batch, records):
        trainer = make_trainer(folder, train=TrainConfig(use_routing_replay=records), megatron={"lr": 3e-2})
        trainer.train(batch)
        return gradient_of(trainer)

    without, both = train(partly, False), train(partly, True)
    assert not torch.equal(without, both)
    trainer = make_trainer(folder)
    rows, free = partly.routed_experts, own_experts(trainer, partly)
    whole = np.concatenate(
        [np.concatenate([rows_of(partly, i), _own(free, partly, i)[rows.known[i] :]]) for i in range(len(LENGTHS))]
    )
    assert torch.equal(both, train(replace(plain, routed_experts=RoutedExperts(whole, plain.lengths)), False))


def _own(free, batch, i):
    return free.rows[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]


def test_reference_and_critic_route_freely(model_folder, make_trainer, make_batch):
    folder, _ = model_folder("qwen3_moe", tied=False)
    plain = make_batch(LENGTHS, micro=3, steps=2)
    batch = with_rows(plain, "qwen3_moe")
    algo = AlgoConfig(advantage_estimator="ppo", use_kl_loss=True, kl_loss_coef=0.05, normalize_advantages=True)
    write_critic(folder.parent / "critic", folder)
    critic = {"critic": CriticConfig(critic_load=str(folder.parent / "critic"), critic_lr=1e-2)}
    trainer = make_trainer(folder, algo=algo, **critic)
    np.testing.assert_array_equal(trainer.values(batch), trainer.values(plain))
    assert np.nanmax(np.abs(trainer.values(plain))) > 0
    free = trainer.train(plain)
    replayed = make_trainer(folder, algo=algo, **critic).train(batch)
    assert replayed["rollout/ref_log_probs"] == free["rollout/ref_log_probs"]
    assert replayed["rollout/log_probs"] != free["rollout/log_probs"]


def test_routers_are_left_free_behind_a_pass_and_by_one_that_replays_nothing(model_folder, make_trainer, make_batch):
    folder, _ = model_folder("qwen3_moe", tied=False)
    plain = make_batch(LENGTHS, micro=3)
    trainer = make_trainer(folder)
    before = trainer.log_probs(plain)
    trainer.log_probs(with_rows(plain, "qwen3_moe"))
    layers = trainer._policy.chunks[0].decoder.layers
    assert all(layer.mlp.router.router_replay is None and layer.mlp.routing is None for layer in layers)
    np.testing.assert_array_equal(trainer.log_probs(plain), before)
    nothing = with_rows(plain, "qwen3_moe", known=np.zeros(len(LENGTHS), int))
    np.testing.assert_array_equal(trainer.log_probs(nothing), before)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lambda n: np.zeros((n, 3, 2), np.uint8),
            r"rollout 7 has routed experts of \(3, 2\) .*the model's are \(2, 2\)",
        ),
        (lambda n: np.full((n, 2, 2), 8, np.uint8), "name expert 8, but a layer has 8"),
        (lambda n: np.ones((n, 2, 2), np.uint16), r"experts of \d+ tokens name an expert twice"),
    ],
    ids=["shape", "number", "twice"],
)
def test_rows_that_no_router_of_the_model_gave_are_refused(model_folder, make_trainer, make_batch, rows, message):
    folder, _ = model_folder("qwen3_moe", tied=False)
    batch = make_batch(LENGTHS, micro=3)
    n = len(batch.tokens)
    with pytest.raises(TrainingError, match=message):
        make_trainer(folder).train(replace(batch, routed_experts=RoutedExperts(rows(n), batch.lengths)))


def test_rows_for_a_model_without_experts_are_refused(model_folder, make_trainer, make_batch):
    folder, _ = model_folder("qwen3")
    with pytest.raises(TrainingError, match=r"the model's are \(2, 0\)"):
        make_trainer(folder).train(with_rows(make_batch(LENGTHS), "qwen3"))
