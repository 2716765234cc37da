"""A critic on ranks of its own gives what one beside the policy gives, however its ranks cut the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.conftest import make_batch_of
from tests.trainer.megatron.critic_processes import CriticProcesses
from tests.trainer.megatron.critics import write_critic
from vime.config import AlgoConfig, CheckpointConfig, CriticConfig, TrainConfig
from vime.config.critic_ranks import critic_layout
from vime.config.parallel import parallel_sizes
from vime.loop.batch_plan import BatchPlanner

pytestmark = pytest.mark.ranks

LENGTHS = [9, 4, 17, 6, 12, 5, 8, 14]
ALGO = AlgoConfig(advantage_estimator="ppo", gamma=0.95, normalize_advantages=True, kl_coef=0.05)
MEGATRON = {"adam_eps": 1e-2, "lr": 1e-2}
APART = {"critic_num_gpus_per_node": 2}


def rollout(seed):
    """Two optimizer steps of four samples: rewards, a tool's tokens, samples that were cut off."""
    batch = make_batch_of(LENGTHS, micro=2, steps=2, seed=seed)
    batch = replace(
        batch,
        rewards=batch.advantages.copy(),
        rollout_id=seed,
        truncated=np.isin(np.arange(len(LENGTHS)), [2, 5]),
    )
    batch.loss_mask[[5, 20]] = 0
    batch.loss_weights[batch.loss_mask == 0] = 0
    return batch


def numbers(metrics):
    """What must be equal: all but times and memory."""
    return {name: value for name, value in metrics.items() if name.startswith(("train/", "rollout/"))}


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer._hf_tensors()}


def train_apart(policy, critic, planner, batch):
    """As `TrainerWithCritic` does it."""
    planned = planner.planned_for_critic(batch)
    policy.begin_train(batch)
    targets = policy.critic_targets(critic.ask("begin_values", planned))
    return policy.end_train() | critic.ask("train", targets)


def test_values_targets_and_both_models_are_those_of_a_critic_in_turn(model_folder, make_trainer, tmp_path):
    folder, _ = model_folder()
    other, _ = model_folder(seed=5)
    head = tmp_path / "critic"
    write_critic(head, folder)
    batches = [rollout(seed) for seed in range(3)]

    def sections(**critic):
        own = CriticConfig(critic_load=str(head), lambd=0.8, critic_lr=3e-3, num_critic_only_steps=1, **critic)
        return dict(algo=ALGO, critic=own, checkpoint=CheckpointConfig(ref_load=str(other)), megatron=MEGATRON)

    in_turn = make_trainer(folder, **sections())
    want = [numbers(in_turn.train(batch)) for batch in batches[:2]]
    in_turn.save(tmp_path / "in turn" / "trainer")
    want_values, want_weights = in_turn.values(batches[2]), weights(in_turn)
    want += [numbers(in_turn.train(batch)) for batch in batches[2:]]
    assert "train/loss" not in want[0] and want[1]["train/grad_norm"] > 0 and want[1]["train/critic-grad_norm"] > 0

    with CriticProcesses(2, tmp_path) as critic:
        for number, layout in enumerate(({}, {"critic_tensor_model_parallel_size": 2})):
            policy = make_trainer(folder, **sections(**APART, **layout))
            critic.build(policy._config, folder)
            sizes = parallel_sizes(critic_layout(MEGATRON, policy._config.critic))
            planner = BatchPlanner(
                train=TrainConfig(micro_batch_size=2),
                dp_size=sizes.data(2),
                sizes=sizes,
                model=None,
                global_batch_size=4,
            )
            # The second layout goes on from the checkpoint of a critic in turn.
            begin = 0
            if number:
                policy.load(tmp_path / "in turn" / "trainer")
                critic.ask("load", tmp_path / "in turn" / "trainer")
                begin = 2
            for k, batch in enumerate(batches[:2][begin:]):
                got = numbers(train_apart(policy, critic, planner, batch))
                assert got == pytest.approx(want[k], rel=1e-4, abs=1e-5), (layout, k)
            np.testing.assert_allclose(
                critic.ask("values", planner.planned_for_critic(batches[2])), want_values, rtol=1e-5, atol=1e-5
            )
            for name, tensor in weights(policy).items():
                torch.testing.assert_close(tensor, want_weights[name], atol=1e-5, rtol=1e-4)
            if not number:
                policy.save(tmp_path / "apart" / "trainer")
                critic.ask("save", tmp_path / "apart" / "trainer")
            for k, batch in enumerate(batches[2:], start=2):
                got = numbers(train_apart(policy, critic, planner, batch))
                assert got == pytest.approx(want[k], rel=1e-4, abs=1e-5), (layout, k)
            critic.ask("close")

    # And back: the checkpoint of a critic on ranks of its own, taken over by one in turn.
    resumed = make_trainer(folder, **sections())
    resumed.load(tmp_path / "apart" / "trainer")
    np.testing.assert_allclose(resumed.values(batches[2]), want_values, rtol=1e-5, atol=1e-5)
    for k, batch in enumerate(batches[2:], start=2):
        assert numbers(resumed.train(batch)) == pytest.approx(want[k], rel=1e-4, abs=1e-5)
