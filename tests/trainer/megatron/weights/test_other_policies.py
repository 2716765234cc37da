"""Teachers and earlier versions of the policy, whose log-probs the loss reads."""

import json
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.test_trainer import LENGTHS
from vime.batch_columns import POLICY_VERSIONS, TEACHER_LOG_PROBS
from vime.config import AlgoConfig, TeacherConfig
from vime.errors import ConfigError, TrainingError

OPD = AlgoConfig(use_opd=True, opd_kl_coef=0.5)


def publish(trainer, version):
    deque(trainer.weights(version), maxlen=0)


def test_old_log_probs_are_those_of_the_version_that_sampled(model_folder, make_trainer, make_batch):
    """Tokens of versions that are no longer kept have the engine's; the two newest that engines got are kept."""
    folder, _ = model_folder()
    trainer = make_trainer(folder, algo=AlgoConfig(keep_old_actor=True), megatron={"lr": 1e-2})
    batch = make_batch(LENGTHS, micro=3)
    said = {}
    for version in (1, 2, 3):
        said[version] = trainer.log_probs(batch)
        publish(trainer, version)
        trainer.train(batch)
    assert not np.array_equal(said[2], said[3], equal_nan=True)
    versions = np.repeat([1, 2, 3, 2, 3, 3, -1, 1], LENGTHS)
    before = trainer.log_probs(batch)
    want = np.where(versions == 2, said[2], np.where(versions == 3, said[3], batch.rollout_log_probs))
    got = trainer.train(replace(batch, is_older=True, extra={POLICY_VERSIONS: versions}))
    on, kl = batch.loss_mask == 1, want - before
    assert got["train/ppo_kl"] == pytest.approx((batch.loss_weights[on] * kl[on]).sum(), rel=1e-4)
    assert got["train/old_actor_ratio"] == pytest.approx((on & (versions > 1)).sum() / on.sum())
    assert "perf/old_actor_log_probs_time" in got
    newer = trainer.train(batch)  # of the trainer's own version: nothing is kept for it
    assert newer["train/ppo_kl"] == 0 and "train/old_actor_ratio" not in newer


def test_a_version_that_is_sent_again_is_kept_once(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    trainer = make_trainer(folder, algo=AlgoConfig(keep_old_actor=True))
    for version in (4, 5, 5, 5):
        publish(trainer, version)
    assert sorted(trainer._others._sent) == [4, 5]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_teacher_is_taken_from_the_advantages(model_folder, make_trainer, make_batch, steps):
    """Of a teacher in the trainer as of one whose log-probs came with the batch."""
    folder, _ = model_folder()
    other, _ = model_folder(seed=9)
    batch = make_batch(LENGTHS, micro=1, steps=steps)
    teacher = make_trainer(other).log_probs(batch)
    student = make_trainer(folder).log_probs(batch)
    own = make_trainer(folder, algo=OPD, teacher=TeacherConfig(opd_teacher_load=str(other))).train(batch)
    served = replace(batch, extra={TEACHER_LOG_PROBS: np.where(batch.loss_mask, teacher, np.nan).astype(np.float32)})
    got = make_trainer(folder, algo=OPD, teacher=TeacherConfig(opd_teacher_url="http://127.0.0.1:1")).train(served)
    wanted = {n: v for n, v in got.items() if n.startswith("train/")}
    assert {n: own[n] for n in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert "perf/teacher_log_probs_time" in own and "perf/teacher_log_probs_time" not in got
    on, kl = batch.loss_mask == 1, student - teacher
    assert own["train/opd_kl"] == pytest.approx((batch.loss_weights[on] * kl[on]).sum() / steps, rel=1e-4)
    if steps == 1:
        advantages = np.repeat(batch.advantages, LENGTHS) - 0.5 * kl
        assert own["train/pg_loss"] == pytest.approx(-(batch.loss_weights[on] * advantages[on]).sum(), rel=1e-4)
    with pytest.raises(TrainingError, match="came without a teacher's log-probs"):
        make_trainer(folder, algo=OPD).train(batch)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_a_teacher_may_be_of_another_size_or_family(model_folder, make_trainer, make_batch, kind):
    folder, _ = model_folder()
    other, _ = model_folder(kind, layers=3, seed=9, tied=False)
    batch = make_batch(LENGTHS, micro=1, steps=2)
    teacher = make_trainer(other).log_probs(batch)
    trainer = make_trainer(folder, algo=OPD, teacher=TeacherConfig(opd_teacher_load=str(other)))
    before = [tensor.clone() for tensor in trainer._others.teacher._chunks[0].parameters()]
    student = trainer.log_probs(batch)
    metrics = trainer.train(batch)
    on, kl = batch.loss_mask == 1, student - teacher
    assert metrics["train/opd_kl"] == pytest.approx((batch.loss_weights[on] * kl[on]).sum() / 2, rel=1e-4)
    assert metrics["perf/teacher_log_probs_time"] > 0
    np.testing.assert_allclose(trainer._others.teacher.log_probs(batch, on)[on], teacher[on], atol=1e-6)
    after = trainer._others.teacher._chunks[0].parameters()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_teacher_of_another_vocabulary_is_refused(model_folder, make_trainer):
    folder, _ = model_folder()
    other, _ = model_folder(seed=9, layers=3)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 62}))
    with pytest.raises(ConfigError, match=r"--opd-teacher-load .* has a vocabulary of 62, the policy of 61"):
        make_trainer(folder, algo=OPD, teacher=TeacherConfig(opd_teacher_load=str(other)))


def test_a_student_approaches_its_teacher(model_folder, make_trainer, make_batch):
    """On what it samples itself, with no reward at all: the KL over whole vocabularies falls."""
    folder, student = model_folder()
    other, teacher = model_folder(seed=9)
    trainer = make_trainer(
        folder,
        algo=replace(OPD, opd_kl_coef=1.0),
        teacher=TeacherConfig(opd_teacher_load=str(other)),
        megatron={"lr": 5e-3},
    )
    plan, seen = make_batch([12] * 64, prompt=4), []
    for _ in range(20):
        student.load_state_dict(dict(trainer._hf_tensors()), strict=False)
        tokens = torch.from_numpy(plan.tokens.reshape(64, 12).astype(np.int64))[:, :4]
        with torch.no_grad():
            while tokens.shape[1] < 12:
                logits = student(tokens).logits[:, -1].float()
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
            p, q = (model(tokens).logits[:, 3:-1].float().log_softmax(-1) for model in (student, teacher))
        seen.append((p.exp() * (p - q)).sum(-1).mean().item())
        metrics = trainer.train(
            replace(plan, tokens=tokens.numpy().astype(np.int32).ravel(), advantages=np.zeros(64, np.float32))
        )
    assert seen[-1] < 0.65 * seen[0] and seen == pytest.approx(sorted(seen, reverse=True), abs=0.02)
    assert metrics["train/opd_kl"] == pytest.approx(seen[-1], abs=0.15)  # an estimate of the same, on the same tokens
