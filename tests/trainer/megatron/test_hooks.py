"""The contracts of the hooks inside the trainer, on a tiny model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.test_trainer import LENGTHS, weights_of
from vime.config import AlgoConfig, LogConfig, RolloutConfig, TrainConfig
from vime.errors import HookError
from vime.types import METRIC_WEIGHTS, PG_WEIGHTS, TOKEN_ADVANTAGES

HOOKS = "tests.trainer.megatron.hooks"


def test_columns_of_the_batch_weight_tokens_and_give_each_its_advantage(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=3)
    plain = make_trainer(folder).train(batch)
    spread = np.repeat(batch.advantages, batch.lengths).astype(np.float32)
    same = make_trainer(folder).train(replace(batch, extra={PG_WEIGHTS: batch.loss_weights, TOKEN_ADVANTAGES: spread}))
    measured = {name: same[name] for name in same if name.startswith(("perf/", "memory/"))}
    assert same == plain | measured
    for extra in ({PG_WEIGHTS: 2 * batch.loss_weights}, {TOKEN_ADVANTAGES: 2 * spread}):
        doubled = make_trainer(folder).train(replace(batch, extra=extra))
        assert doubled["train/pg_loss"] == pytest.approx(2 * plain["train/pg_loss"], rel=1e-5)
        assert doubled["train/entropy_loss"] == pytest.approx(plain["train/entropy_loss"], rel=1e-6)


def paths(**settings):
    """Settings by name, each with the name of a function here; by section."""
    sections = {"algo": AlgoConfig, "rollout": RolloutConfig, "train": TrainConfig}
    filled = {}
    for name, function in settings.items():
        section = next(s for s, cls in sections.items() if name in cls.__dataclass_fields__)
        filled.setdefault(section, {})[name] = f"{HOOKS}.{function}"
    return {section: sections[section](**fields) for section, fields in filled.items()}


def test_every_hook_of_the_trainer_is_called_in_its_turn(model_folder, make_trainer, make_batch, tmp_path):
    folder, _ = model_folder()
    sections = paths(
        custom_megatron_init_path="init",
        custom_model_provider_path="provider",
        custom_megatron_before_log_prob_hook_path="before_log_prob",
        custom_megatron_before_train_step_hook_path="before_step",
    )
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1)
    trainer = make_trainer(folder, log=LogConfig(run_dir=str(tmp_path)), algo=algo, **sections)
    before = weights_of(trainer)
    trainer.train(make_batch(LENGTHS, steps=2))
    assert (tmp_path / "calls").read_text().splitlines() == [
        "init 0 1 True",
        "provider True True",
        "log_prob '' True",
        "log_prob 'ref_' True",
        "step 7 0 True True",
        "step 7 1 True True",
    ]
    after = weights_of(trainer)
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert same == {name for name in after if "embed_tokens" in name}
    with pytest.raises(HookError, match=r"provider_of_a_layer returned Linear.* a vime\.trainer\.megatron\.nn\.model"):
        make_trainer(folder, **paths(custom_model_provider_path="provider_of_a_layer"))


def test_advantages_of_ones_own_per_sample_or_per_token(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=3)
    plain = make_trainer(folder).train(batch)
    zero = make_trainer(folder, **paths(custom_advantage_function_path="zero_advantages")).train(batch)
    assert zero["train/pg_loss"] == 0 and zero["rollout/advantages/max"] == 0
    spread = make_trainer(folder, **paths(custom_advantage_function_path="spread_advantages")).train(batch)
    assert spread["train/pg_loss"] == pytest.approx(plain["train/pg_loss"], rel=1e-5)
    assert spread["rollout/advantages"] == pytest.approx(float(batch.advantages.mean()), rel=1e-5)
    for name, words in (
        ("three_advantages", r"three_advantages gave advantages of shape \(3,\); \(8,\), one a sample, or \(68,\)"),
        ("advantage_with_a_bug", r"raised AttributeError: .* \(hooks.py, line \d+, in advantage_with_a_bug\)"),
    ):
        with pytest.raises(HookError, match=words):
            make_trainer(folder, **paths(custom_advantage_function_path=name)).train(batch)


def test_a_batch_may_be_changed_before_it_is_trained_on(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=3)
    got = make_trainer(folder, **paths(rollout_data_postprocess_path="mask_first_sample")).train(batch)
    mask = batch.loss_mask.copy()
    mask[: LENGTHS[0]] = 0
    weights = batch.loss_weights * mask
    want = make_trainer(folder).train(replace(batch, loss_mask=mask, loss_weights=weights))
    assert got["train/pg_loss"] == pytest.approx(want["train/pg_loss"], rel=1e-6)
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-6)
    weighed = replace(batch, extra={PG_WEIGHTS: batch.loss_weights})
    with pytest.raises(HookError, match=r"changed loss_mask, but left extra\['pg_loss_weights'\]"):
        make_trainer(folder, **paths(rollout_data_postprocess_path="mask_first_sample")).train(weighed)
    with pytest.raises(HookError, match=r"changed loss_mask, but left extra\['pg_loss_weights'\]"):
        make_trainer(folder, **paths(rollout_data_postprocess_path="mask_first_sample_and_weigh")).train(weighed)
    metrics = replace(batch, extra={METRIC_WEIGHTS: batch.loss_weights})
    got = make_trainer(folder, **paths(rollout_data_postprocess_path="mask_first_sample_and_weigh")).train(metrics)
    assert got["train/pg_loss"] == pytest.approx(2 * want["train/pg_loss"], rel=1e-6)
    assert got["train/ratio"] == pytest.approx(7 / 8)  # of the tokens that are left
    for name, words in (
        ("unmask_prompts", "put tokens under mask 1 that were under mask 0"),
        ("other_tokens", "changed tokens, on which the plan of the step rests"),
    ):
        with pytest.raises(HookError, match=words):
            make_trainer(folder, **paths(rollout_data_postprocess_path=name)).train(batch)


def test_a_loss_of_ones_own_takes_the_place_of_the_policy_loss(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=3, steps=2)
    turns = {"turns": np.arange(batch.num_samples)}
    plain = make_trainer(folder).train(batch)
    algo = AlgoConfig(loss_type="custom_loss", custom_loss_function_path=f"{HOOKS}.same_loss")
    own = make_trainer(folder, algo=algo).train(replace(batch, extra=turns))
    for name in ("train/loss", "train/pg_loss", "train/grad_norm", "train/ppo_kl", "train/entropy_loss"):
        assert own[name] == pytest.approx(plain[name], rel=1e-5)
    assert own["custom/clipped"] == pytest.approx(plain["train/pg_clipfrac"], rel=1e-5)
    assert own["custom/tokens"] == batch.loss_mask.sum() / 2
    algo = AlgoConfig(loss_type="custom_loss", custom_loss_function_path=f"{HOOKS}.loss_where_there_are_tokens")
    one = make_batch(LENGTHS)
    # The last micro-batch's backward starts the reductions, and with experts other ranks wait for it.
    [plan] = one.steps
    padded = replace(one, steps=(((*plan[0], ()),),))
    overlap = {"overlap_grad_reduce": True}
    trainers = (make_trainer(folder, algo=algo, megatron=overlap) for _ in range(2))
    # From the second step on, that is; the first starts them itself.
    want, got = ([t.train(b) for b in (one, second)][1] for t, second in zip(trainers, (one, padded), strict=True))
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-6)
    algo = AlgoConfig(loss_type="custom_loss", custom_loss_function_path=f"{HOOKS}.loss_without_gradient")
    with pytest.raises(HookError, match=r"loss_without_gradient returned 1.0|tensor\(1\.\)"):
        make_trainer(folder, algo=algo).train(batch)
