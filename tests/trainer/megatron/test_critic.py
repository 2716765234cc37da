"""PPO's critic against transformers, plain loops, and itself resumed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.conftest import make_batch_of
from tests.trainer.megatron.critics import before_tokens, plain_gae, state_values, write_critic
from vime.algo.value_loss import value_loss
from vime.config import AlgoConfig, CheckpointConfig, CriticConfig, TrainConfig
from vime.errors import ConfigError, TrainingError

LENGTHS = [9, 4, 17, 6]
PPO = AlgoConfig(advantage_estimator="ppo", gamma=0.95)


@pytest.fixture
def critic_folder(tmp_path, model_folder):
    """(kind, ...) -> (policy's folder, transformers model, critic's folder, head)."""

    def make(kind="qwen3", *, bias=True, **kwargs):
        folder, model = model_folder(kind, **kwargs)
        critic = tmp_path / f"critic-of-{folder.name}"
        return folder, model, critic, write_critic(critic, folder, bias=bias)

    return make


@pytest.fixture
def make_batch():
    """As `make_batch_of`, each sample with a reward."""

    def make(*args, **kwargs):
        batch = make_batch_of(*args, **kwargs)
        return replace(batch, rewards=batch.advantages.copy())

    return make


def with_ends(batch, *cut_off):
    """The batch with some samples marked as cut off."""
    return replace(batch, truncated=np.isin(np.arange(batch.num_samples), cut_off))


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("qwen3", True), ("llama", False), ("qwen2", True), ("qwen3_moe", False), ("glm4_moe", False)],
)
def test_values_are_those_of_transformers(critic_folder, make_trainer, make_batch, kind, tied):
    folder, model, critic, head = critic_folder(kind, tied=tied, bias=tied)
    trainer = make_trainer(folder, algo=PPO, critic=CriticConfig(critic_load=str(critic)))
    batch = make_batch(LENGTHS, micro=3)
    with torch.no_grad():
        want = before_tokens(state_values(model, head, batch), batch)
    got = trainer.values(batch)
    assert np.abs(got[~np.isnan(got)]).max() > 0.3
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_loss_gradient_and_advantages_are_those_of_the_formulas(critic_folder, make_trainer, make_batch):
    """A rollout with a tool's token, a cut-off sample and one without a trainable token, written out in torch."""
    folder, model, critic, head = critic_folder()
    settings = CriticConfig(critic_load=str(critic), lambd=0.8, value_clip=0.2, value_loss_coef=0.5)
    batch = with_ends(make_batch(LENGTHS, micro=2), 2)
    batch.loss_mask[[5, 20]] = 0
    batch.loss_mask[batch.cu_seqlens[3] :] = 0
    batch.loss_weights[batch.loss_mask == 0] = 0
    seen = []
    trainer = make_trainer(folder, algo=PPO, critic=settings, megatron={"clip_grad": 0.0})
    keep = trainer._critic.train
    trainer._critic.train = lambda batch, mask: seen.append(batch) or keep(batch, mask)
    metrics = trainer.train(batch)

    for parameter in (head := [part.clone().requires_grad_() for part in head]):
        parameter.grad = None
    behind = state_values(model, head, batch)
    values = before_tokens(behind, batch)
    old, advantages = values.detach().double().numpy(), np.zeros(len(batch.tokens))
    for i in range(batch.num_samples):
        rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        on = np.flatnonzero(batch.loss_mask[rows])
        rewards = np.zeros(batch.lengths[i])
        if len(on):
            rewards[on[-1]] = batch.rewards[i]
        at_end = behind[batch.cu_seqlens[i + 1] - 1].item() if i == 2 else 0.0
        of_sample = plain_gae(rewards, old[rows], batch.loss_mask[rows], at_end, PPO.gamma, settings.lambd)
        for t, a in of_sample.items():
            advantages[batch.cu_seqlens[i] + t] = a
    on = torch.from_numpy(batch.loss_mask != 0)
    np.testing.assert_allclose(seen[0].extra["token_advantages"], advantages, atol=2e-5)
    returns = torch.from_numpy(np.where(on, advantages + np.nan_to_num(old), 0)).float()
    loss = value_loss(values[on], values[on].detach(), returns[on], clip=0.2).loss
    loss = 0.5 * (torch.from_numpy(batch.loss_weights)[on] * loss).sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in [*model.model.parameters(), *head]]).norm()
    assert metrics["train/critic-value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/critic-grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["rollout/advantages"] == pytest.approx(advantages[on].mean(), abs=1e-5)
    assert metrics["rollout/advantages/std"] == pytest.approx(advantages[on].std(), rel=1e-4)
    assert metrics["rollout/returns"] == pytest.approx(returns[on].mean().item(), abs=1e-5)
    error = returns[on].double() - values[on].detach().double()
    explained = 1 - error.var(correction=0) / returns[on].double().var(correction=0)
    assert metrics["train/critic-explained_variance"] == pytest.approx(explained.item(), rel=1e-4)


def test_the_policy_is_trained_with_the_critics_advantages(model_folder, make_trainer, make_batch):
    """With values of 0, lambda and gamma of 1 every token of a sample has the sample's reward as its advantage."""
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=2)
    got = make_trainer(folder, algo=AlgoConfig(advantage_estimator="ppo")).train(batch)
    want = make_trainer(folder).train(batch)
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-6)
    assert got["train/loss"] == pytest.approx(want["train/loss"], rel=1e-6)
    assert got["rollout/values"] == 0


def test_whitened_advantages_are_of_the_whole_rollout(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    algo = AlgoConfig(advantage_estimator="ppo", normalize_advantages=True)
    metrics = make_trainer(folder, algo=algo).train(make_batch(LENGTHS, micro=1, steps=2))
    on = sum(length - 3 for length in LENGTHS)
    assert metrics["rollout/advantages"] == pytest.approx(0, abs=1e-9)
    assert metrics["rollout/advantages/std"] == pytest.approx(np.sqrt((on - 1) / on), rel=1e-6)


def test_the_kl_to_the_reference_is_taken_from_the_reward(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    other, _ = model_folder(seed=5)
    algo = AlgoConfig(advantage_estimator="ppo", kl_coef=0.1)
    trainer = make_trainer(folder, algo=algo, checkpoint=CheckpointConfig(ref_load=str(other)))
    batch = make_batch(LENGTHS, micro=2)
    mask = batch.loss_mask != 0
    policy = trainer.log_probs(batch)
    metrics = trainer.train(batch)
    reference = make_trainer(other).log_probs(batch)
    kl = np.where(mask, policy - reference, 0.0)
    per_sample = [part[part != 0].mean() for part in np.split(kl, batch.cu_seqlens[1:-1])]
    assert metrics["rollout/kl"] == pytest.approx(np.mean(per_sample), rel=1e-4)
    # Values are 0, so a return is the reward less the price of all tokens from here on.
    to_go = [np.cumsum(part[::-1])[::-1] for part in np.split(kl, batch.cu_seqlens[1:-1])]
    returns = np.repeat(batch.rewards, batch.lengths) - 0.1 * np.concatenate(to_go)
    assert metrics["rollout/returns"] == pytest.approx(returns[mask].mean(), rel=1e-4)


def test_neither_micro_batches_nor_packing_change_the_critic(critic_folder, make_trainer, make_batch):
    folder, _, critic, _ = critic_folder()
    results = []
    for micro, limit in ((1, None), (2, 1000), (4, 40)):
        trainer = make_trainer(
            folder,
            algo=PPO,
            critic=CriticConfig(critic_load=str(critic)),
            train=TrainConfig(log_probs_max_tokens_per_gpu=limit),
        )
        batch = with_ends(make_batch(LENGTHS, micro=micro), 0, 2)
        results.append([trainer.train(batch) for _ in range(2)])
    for name in ("train/critic-value_loss", "train/critic-grad_norm", "train/grad_norm", "rollout/advantages/max"):
        for k in range(2):
            want = results[0][k][name]
            assert [r[k][name] for r in results] == pytest.approx([want] * 3, rel=2e-5), name


@pytest.mark.parametrize("kind", ["all", "zero", "skip"])
def test_masked_tokens_are_what_the_setting_says(critic_folder, make_trainer, make_batch, kind):
    folder, model, critic, head = critic_folder()
    settings = CriticConfig(critic_load=str(critic), gae_masked_tokens=kind, lambd=0.5)
    batch = make_batch([12])
    batch.loss_mask[[5, 6]] = 0
    metrics = make_trainer(folder, algo=PPO, critic=settings).train(batch)
    with torch.no_grad():
        values = before_tokens(state_values(model, head, batch), batch).double().numpy()
    mask = batch.loss_mask != 0
    rewards, steps = np.zeros(12), mask.copy()
    rewards[-1] = batch.rewards[0]
    if kind != "skip":
        steps[5:7] = True
    if kind == "zero":
        values[5:7] = 0
    advantages = plain_gae(rewards, values, steps, 0.0, PPO.gamma, 0.5)
    chosen = [a for t, a in advantages.items() if mask[t]]
    assert metrics["rollout/advantages"] == pytest.approx(np.mean(chosen), rel=1e-4)
    assert metrics["rollout/advantages/max"] == pytest.approx(np.max(chosen), rel=1e-4)


def test_a_cut_off_sample_may_be_taken_as_ended(critic_folder, make_trainer, make_batch):
    folder, _, critic, _ = critic_folder()
    batch = make_batch(LENGTHS, micro=2)
    found = [
        make_trainer(
            folder,
            algo=PPO,
            critic=CriticConfig(critic_load=str(critic), disable_truncation_bootstrap=disabled),
        ).train(rollout)["rollout/returns"]
        for disabled, rollout in ((False, batch), (True, with_ends(batch, 1, 2)), (False, with_ends(batch, 1, 2)))
    ]
    assert found[0] == found[1] != found[2]


def test_the_first_rollouts_may_train_the_critic_alone(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder, algo=PPO, critic=CriticConfig(num_critic_only_steps=8, critic_lr=1e-2))
    batch = make_batch(LENGTHS, micro=2)
    before = {name: tensor.clone() for name, tensor in trainer._hf_tensors()}
    losses = [trainer.train(batch) for _ in range(15)]
    assert losses[-1]["train/critic-value_loss"] < 0.5 * losses[0]["train/critic-value_loss"]
    assert losses[-1]["train/critic-explained_variance"] > 0.5
    assert "train/loss" not in losses[0] and losses[0]["train/train_rollout_logprob_abs_diff"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._hf_tensors())
    later = trainer.train(replace(batch, rollout_id=8))
    assert later["train/grad_norm"] > 0 and later["train/step"] == 1
    assert not all(torch.equal(tensor, before[name]) for name, tensor in trainer._hf_tensors())


def test_its_optimizer_has_settings_of_its_own(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    settings = CriticConfig(critic_lr=3e-3, critic_lr_warmup_iters=2, critic_clip_grad=0.25, critic_weight_decay=0.5)
    trainer = make_trainer(folder, algo=PPO, critic=settings, megatron={"lr": 1e-3, "clip_grad": 2.0})
    metrics = [trainer.train(make_batch(LENGTHS, micro=2)) for _ in range(3)]
    assert [m["train/critic-lr-pg_0"] for m in metrics] == pytest.approx([0, 1.5e-3, 3e-3])
    assert [m["train/lr-pg_0"] for m in metrics] == pytest.approx([1e-3] * 3)
    optimizer = trainer._critic.trained.optimizer
    assert optimizer.config.clip_grad == 0.25 and trainer._policy.optimizer.config.clip_grad == 2
    assert {g["weight_decay"] for g in optimizer.param_groups} <= {0.0, 0.5}


@pytest.mark.parametrize("megatron", [{}, {"use_distributed_optimizer": False}, {"bf16": True}])
def test_a_resumed_run_takes_the_same_steps(model_folder, make_trainer, make_batch, tmp_path, megatron):
    folder, _ = model_folder()
    settings = dict(algo=PPO, train=TrainConfig(lr_decay_style="cosine", lr_decay_iters=10), megatron=megatron)
    batches = [with_ends(make_batch(LENGTHS, seed=s), 1) for s in range(4)]
    straight = make_trainer(folder, **settings)
    for batch in batches[:2]:
        straight.train(batch)
    straight.save(tmp_path / "ck")
    want = [straight.train(batch) for batch in batches[2:]]
    resumed = make_trainer(folder, **settings)
    resumed.load(tmp_path / "ck")
    got = [resumed.train(batch) for batch in batches[2:]]
    for a, b in zip(got, want, strict=True):
        same = [name for name in b if name.startswith(("train/", "rollout/"))]
        assert {name: a[name] for name in same} == {name: b[name] for name in same}


def test_a_checkpoint_without_a_critic_gives_its_policy_alone(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS)
    plain = make_trainer(folder)
    plain.train(batch)
    plain.save(tmp_path / "ck")
    want = {name: tensor.clone() for name, tensor in plain._hf_tensors()}
    with pytest.raises(ConfigError, match="no critic; add --finetune"):
        make_trainer(folder, algo=PPO).load(tmp_path / "ck")
    begun = make_trainer(folder, algo=PPO, checkpoint=CheckpointConfig(finetune=True, load="x"))
    begun.load(tmp_path / "ck")
    assert all(torch.equal(tensor, want[name]) for name, tensor in begun._hf_tensors())
    assert begun.train(batch)["rollout/values"] == 0


def test_a_run_without_a_critic_goes_on_from_a_checkpoint_with_one(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS)
    trainer = make_trainer(folder, algo=PPO)
    trainer.train(batch)
    trainer.save(tmp_path / "ck")
    want = {name: tensor.clone() for name, tensor in trainer._hf_tensors()}
    plain = make_trainer(folder)
    plain.load(tmp_path / "ck")
    assert all(torch.equal(tensor, want[name]) for name, tensor in plain._hf_tensors())


def test_a_critic_of_another_shape_is_refused(critic_folder, model_folder, make_trainer):
    folder, *_ = critic_folder()
    other, _ = model_folder(layers=3)
    with pytest.raises(ConfigError, match=r"--critic-load .* has another architecture"):
        make_trainer(folder, algo=PPO, critic=CriticConfig(critic_load=str(other)))


def test_a_classifier_of_several_classes_is_refused(critic_folder, make_trainer):
    from safetensors.torch import load_file, save_file

    folder, _, critic, _ = critic_folder()
    tensors = load_file(critic / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].repeat(3, 1)
    save_file(tensors, critic / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"score\.weight \[3, 48\], not \[1, 48\]"):
        make_trainer(folder, algo=PPO, critic=CriticConfig(critic_load=str(critic)))


def test_a_reward_that_is_not_finite_stops_before_either_model_changes(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder, algo=PPO)
    batch = make_batch(LENGTHS, micro=2)
    before = [p.clone() for model in trainer._trained for p in model.chunks[0].parameters()]
    spoilt = replace(batch, rewards=np.where(np.arange(4) == 2, np.nan, batch.rewards).astype(np.float32))
    with pytest.raises(TrainingError, match=r"of the critic in rollout 7, step 0 .*rewards, or lower --critic-lr"):
        trainer.train(spoilt)
    after = [p for model in trainer._trained for p in model.chunks[0].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert trainer.train(batch)["train/critic-grad_norm"] > 0


def test_a_trainer_without_a_critic_has_no_values(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    with pytest.raises(ValueError, match="no critic"):
        make_trainer(folder).values(make_batch(LENGTHS))
