"""PPO's critic on one CUDA device: values, a step, leaving the device and coming back, resuming."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.megatron.critics import before_tokens, state_values, write_critic
from vime.config import AlgoConfig, CriticConfig
from vime.platform import get_platform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = get_platform("cuda")
PPO = AlgoConfig(advantage_estimator="ppo", gamma=0.95, normalize_advantages=True, kl_coef=0.01)
LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_values_are_those_of_transformers(model_folder, make_trainer, make_batch, tmp_path, kind, dtype, bound):
    folder, model = model_folder(kind, dtype=dtype)
    head = write_critic(tmp_path / "critic", folder)
    batch = make_batch(LENGTHS, micro=3)
    critic = CriticConfig(critic_load=str(tmp_path / "critic"))
    got = make_trainer(folder, algo=PPO, critic=critic, platform=CUDA).values(batch)
    with torch.no_grad():
        want = before_tokens(state_values(model.float(), head, batch), batch).numpy()
    assert (np.isnan(got) == np.isnan(want)).all()
    assert np.nanmax(np.abs(got - want)) < bound * np.nanmax(np.abs(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_models_leave_the_device_come_back_and_resume(model_folder, make_trainer, make_batch, tmp_path, dtype):
    folder, _ = model_folder(dtype=dtype)
    batch = make_batch(LENGTHS, micro=3)
    batch = replace(batch, rewards=batch.advantages, truncated=np.arange(len(LENGTHS)) % 3 == 0)
    settings = {"algo": PPO, "critic": CriticConfig(critic_lr=1e-2), "megatron": {"lr": 1e-3}, "platform": CUDA}
    trainer = make_trainer(folder, **settings)
    first = trainer.train(batch)
    critic = trainer._critic.trained
    tensors = [*critic.chunks[0].parameters(), *critic.optimizer_tensors(), *trainer._policy.optimizer_tensors()]
    kept = [tensor.clone() for tensor in tensors]
    there = torch.cuda.memory_allocated()
    trainer.offload(("state",))
    weights = sum(p.numel() * p.element_size() for p in critic.chunks[0].parameters())
    assert there - torch.cuda.memory_allocated() > 3 * weights
    trainer.onload(("state",))
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, kept, strict=True))
    trainer.save(tmp_path / "ck")
    want = [trainer.train(batch) for _ in range(6)]
    assert want[-1]["train/critic-value_loss"] < first["train/critic-value_loss"]
    resumed = make_trainer(folder, **settings)
    resumed.load(tmp_path / "ck")
    got = resumed.train(batch)
    for name in ("train/critic-value_loss", "train/critic-grad_norm", "train/loss", "rollout/values"):
        assert got[name] == pytest.approx(want[0][name], rel=1e-5, abs=1e-6), name
