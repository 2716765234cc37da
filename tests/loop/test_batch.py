"""Groups to TrainBatch, on hand-made samples with numbers derived beside them."""

import gc
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from vime.config import AlgoConfig, TrainConfig
from vime.config.parallel import ParallelSizes, parallel_sizes
from vime.errors import ConfigError, DataError
from vime.loop.batch import make_train_batch
from vime.models import family_of
from vime.types import Group, Sample, SampleStatus

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 64,
}
MODEL = family_of(HF).settings(HF)


def sample(group_id, sample_id, reward, *, prompt=(1, 2), response=(3, 4), trajectory_id=None, **kw):
    s = Sample(
        tokens=prompt,
        group_id=group_id,
        sample_id=sample_id,
        trajectory_id=sample_id if trajectory_id is None else trajectory_id,
        reward=reward,
        status=kw.pop("status", SampleStatus.COMPLETED),
        **kw,
    )
    s.append_response(response, [-0.1 * (t + 1) for t in range(len(response))], version=0)
    return s


def make(groups, **kw):
    settings = dict(
        rollout_id=3, algo=AlgoConfig(), train=TrainConfig(), dp_size=1, reward_key=None, global_batch_size=4
    )
    return make_train_batch(groups, **(settings | kw))


def test_a_critic_gets_rewards_and_the_trainer_makes_advantages_of_them():
    groups = [Group(5, [sample(5, 0, 1.0), sample(5, 1, 0.25)])]
    batch, metrics = make(groups, algo=AlgoConfig(advantage_estimator="ppo"), global_batch_size=2)
    assert batch.rewards.tolist() == [1, 0.25] and batch.advantages.tolist() == [0, 0]
    assert metrics["rollout/raw_reward"] == 0.625
    assert not [name for name in metrics if name.startswith(("rollout/advantages", "rollout/rewards"))]


def two_groups():
    return [
        Group(5, [sample(5, 0, 1.0), sample(5, 1, 0.0, response=(7,))]),
        Group(9, [sample(9, 2, 2.0, prompt=(1,)), sample(9, 3, 2.0, response=(6, 6, 6))]),
    ]


def test_columns_are_aligned_with_their_tokens():
    batch, _ = make(two_groups())
    assert batch.rollout_id == 3
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 10, 15]
    assert batch.tokens.tolist() == [1, 2, 3, 4, 1, 2, 7, 1, 3, 4, 1, 2, 6, 6, 6]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1]
    expected = [np.nan] * 2 + [-0.1, -0.2] + [np.nan] * 2 + [-0.1, np.nan, -0.1, -0.2] + [np.nan] * 2
    np.testing.assert_allclose(batch.rollout_log_probs, [*expected, -0.1, -0.2, -0.3], rtol=1e-6)
    assert batch.group_ids.tolist() == [5, 5, 9, 9]
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0, 2.0]
    assert batch.tokens.dtype == np.int32 and batch.loss_weights.dtype == np.float32


def test_advantages_are_per_group_and_weights_are_the_trajectory_mean():
    batch, metrics = make(two_groups())
    a = 1 / math.sqrt(2)  # two rewards one apart: (1/2) / (std 1/sqrt 2)
    np.testing.assert_allclose(batch.advantages, [a, -a, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(
        batch.loss_weights, np.array([0, 0, 1 / 2, 1 / 2, 0, 0, 1, 0, 1 / 2, 1 / 2, 0, 0, 1 / 3, 1 / 3, 1 / 3]) / 4
    )
    assert metrics["rollout/raw_reward"] == 1.25
    assert (metrics["rollout/raw_reward/min"], metrics["rollout/raw_reward/max"]) == (0, 2)
    assert metrics["rollout/zero_std"] == 0.5
    assert metrics["rollout/advantages/max"] == pytest.approx(a, rel=1e-5)
    assert metrics["rollout/advantages"] == pytest.approx(0, abs=1e-12)


def test_normalisation_settings():
    groups = two_groups()
    centred, _ = make(groups, algo=AlgoConfig(disable_grpo_std_normalization=True))
    assert centred.advantages.tolist() == [0.5, -0.5, 0, 0]
    raw, _ = make(groups, algo=AlgoConfig(disable_rewards_normalization=True))
    assert raw.advantages.tolist() == [1, 0, 2, 2]


def test_siblings_pool_their_tokens_and_count_once():
    groups = [
        Group(0, [sample(0, 0, 1.0, trajectory_id=8), sample(0, 1, 1.0, response=(3, 4, 5, 6), trajectory_id=8)]),
        Group(1, [sample(1, 2, 0.0)]),
    ]
    groups[0].samples.append(sample(0, 3, 0.0))
    batch, metrics = make(groups, global_batch_size=3)
    weights = [batch.loss_weights[a:b].sum() for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    np.testing.assert_allclose(weights, np.array([2 / 6, 4 / 6, 1, 1]) / 3, rtol=1e-6)
    a = 1 / math.sqrt(2)
    np.testing.assert_allclose(batch.advantages, [a, a, -a, 0], rtol=1e-5)
    assert metrics["rollout/raw_reward"] == pytest.approx(1 / 3)


def test_the_order_of_samples_and_steps_is_kept():
    groups = [Group(g, [sample(g, 2 * g, 0.0), sample(g, 2 * g + 1, 1.0)]) for g in range(3)]
    batch, _ = make(groups, global_batch_size=2)
    assert [sorted(i for r in s for m in r for i in m) for s in batch.steps] == [[0, 1], [2, 3], [4, 5]]


def test_dict_rewards_need_the_key():
    groups = [Group(0, [sample(0, 0, {"right": 1.0, "style": 0.0}), sample(0, 1, {"right": 0.0, "style": 9.0})])]
    batch, _ = make(groups, reward_key="right")
    assert batch.rewards.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"\['right', 'style'\]; choose one by --reward-key"):
        make(groups)
    with pytest.raises(DataError, match="no reward 'rigth'"):
        make(groups, reward_key="rigth")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(reward=None), "sample 1 of group 0 has no reward"),
        (dict(reward=math.nan), "has the reward nan"),
        (dict(reward=math.inf), "has the reward inf"),
        (dict(status=SampleStatus.PENDING), "sample 1 of group 0 is pending"),
        (dict(status=SampleStatus.FAILED, metadata={"error": "tool died"}), "is failed .tool died."),
        (dict(trajectory_id=-1), "trajectory_id -1"),
        (dict(trajectory_id=0), "samples 0 and 1 belong to trajectory 0 but their rewards are 0.0 and 1.0"),
        (dict(prompt=()), "no prompt"),
    ],
)
def test_bad_samples_are_named(change, message):
    bad = sample(0, 1, **({"reward": 1.0} | change))
    with pytest.raises(DataError, match=message):
        make([Group(0, [sample(0, 0, 0.0), bad])])


def test_an_empty_batch_is_an_error():
    with pytest.raises(DataError, match="rollout 3 holds no samples"):
        make([])
    with pytest.raises(DataError, match="1 groups"):
        make([Group(0, [])])


def test_a_fully_masked_sample_is_kept_with_weight_zero():
    masked = Sample(tokens=(1, 2), group_id=0, sample_id=1, trajectory_id=1, reward=1.0, status=SampleStatus.COMPLETED)
    masked.append_response((3, 4), trainable=False)
    batch, metrics = make([Group(0, [sample(0, 0, 0.0), masked])], global_batch_size=2)
    assert batch.loss_weights.tolist() == [0, 0, 0.25, 0.25, 0, 0, 0, 0]
    assert metrics["rollout/masked_ratio"] == 0.5
    assert np.isnan(batch.rollout_log_probs[4:]).all()


def test_a_token_budget_splits_the_step():
    train = TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=8)
    batch, _ = make(two_groups(), train=train)
    assert all(sum(batch.lengths[i] for i in micro) <= 8 for micro in batch.steps[0][0])
    # Each of two context-parallel ranks has half the tokens.
    shared, _ = make(two_groups(), train=train, sizes=ParallelSizes(context=2))
    assert len(shared.steps[0][0]) == 1 < len(batch.steps[0][0])
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu"):
        make(two_groups(), train=replace(train, max_tokens_per_gpu=None))


def test_virtual_pipeline_stages_get_their_micro_batches_in_groups():
    sizes = parallel_sizes({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2})
    for train in (TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=99), TrainConfig(micro_batch_size=4)):
        batch, _ = make(two_groups(), train=train, sizes=sizes)
        assert [len(micro) for micro in batch.steps[0][0]] == [2, 2], "split, though one would hold them"


def test_ranks_are_balanced_by_the_models_operations():
    model = replace(MODEL, transformer={**MODEL.transformer, "kv_channels": 4096})  # attention is most of it
    lengths = [40, 20, 20, 20, 20, 20]  # 40 tokens are twice 20 tokens, but about three times their operations
    groups = [Group(0, [sample(0, i, float(i), response=(3,) * (n - 2)) for i, n in enumerate(lengths)])]
    train = TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=200)
    by_tokens, _ = make(groups, train=train, dp_size=2, global_batch_size=6)
    by_flops, _ = make(groups, train=train, dp_size=2, global_batch_size=6, model=model)
    assert sorted(len(rank[0]) for rank in by_tokens.steps[0]) == [3, 3]
    assert sorted(len(rank[0]) for rank in by_flops.steps[0]) == [2, 4]


def test_long_responses_are_no_more_work_in_python_than_short_ones():
    def num_calls(response_length):
        groups = [Group(0, [sample(0, i, float(i % 2), response=(3,) * response_length) for i in range(4)])]
        calls = []
        gc.disable()  # a collection calls whatever has asked to hear of it
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event in ("call", "c_call") else None)
        try:
            make(groups)
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(calls)

    num_calls(2)  # whatever is imported or cached at first
    assert num_calls(200) == num_calls(20)


def test_supervised_training_takes_the_token_mean_and_needs_no_reward():
    groups = two_groups()
    for s in (s for g in groups for s in g.samples):
        s.reward = None
    batch, metrics = make(groups, algo=AlgoConfig(loss_type="sft_loss"), global_batch_size=2)
    per_step = [1 / 3] * 3 + [1 / 5] * 5  # three trained tokens in the first step, five in the second
    np.testing.assert_allclose(batch.loss_weights[batch.loss_mask == 1], per_step, rtol=1e-6)
    assert batch.advantages.tolist() == [0] * 4
    assert "rollout/raw_reward" not in metrics


def test_policy_loss_refuses_supervised_tokens():
    taught = Sample(tokens=(1, 2), group_id=0, sample_id=7, trajectory_id=7, reward=1.0, status=SampleStatus.COMPLETED)
    taught.append_response((3, 4), supervised=True)
    groups = [Group(0, [sample(0, 0, 0.0), taught])]
    with pytest.raises(DataError, match="sample 7 of group 0 has a trainable token without a rollout log-prob"):
        make(groups)
    batch, _ = make(groups, algo=AlgoConfig(loss_type="sft_loss"))
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert np.isnan(batch.rollout_log_probs[4:]).all()


def test_making_batches_needs_no_torch():
    code = "import sys, vime.loop.batch; assert not {'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("algo", "advantages"),
    [
        (dict(advantage_estimator="dr_grpo", loss_agg_length=10), [0.5, -0.5, 0, 0]),
        (dict(advantage_estimator="rloo"), [1, -1, 0, 0]),
        (dict(advantage_estimator="gspo"), [0.7071, -0.7071, 0, 0]),
        (dict(advantage_estimator="cispo"), [0.7071, -0.7071, 0, 0]),
        # Rewards by token 1 1 0 2 2 2 2 2: mean 1.5, sum of squares 4, std sqrt(4 / 7).
        (dict(advantage_estimator="reinforce_plus_plus"), np.array([-0.5, -1.5, 0.5, 0.5]) / math.sqrt(4 / 7)),
    ],
)
def test_estimators_by_name(algo, advantages):
    batch, metrics = make(two_groups(), algo=AlgoConfig(**algo))
    np.testing.assert_allclose(batch.advantages, advantages, atol=1e-3)
    assert metrics["rollout/advantages/max"] == pytest.approx(max(advantages), abs=1e-3)


def test_advantages_that_differ_by_token_are_a_column():
    batch, _ = make(two_groups(), algo=AlgoConfig(advantage_estimator="reinforce_plus_plus", gamma=0.5))
    column = batch.extra["token_advantages"]
    assert column.dtype == np.float32 and not column[batch.loss_mask == 0].any()
    on = column[batch.loss_mask == 1].astype(np.float64)
    # Returns 0.5 1 | 0 | 1 2 | 0.5 1 2.
    returns = np.array([0.5, 1, 0, 1, 2, 0.5, 1, 2])
    np.testing.assert_allclose(on, (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5)


def test_the_kl_in_the_reward_leaves_advantages_to_the_trainer():
    batch, metrics = make(two_groups(), algo=AlgoConfig(kl_coef=0.1))
    assert not batch.advantages.any() and "rollout/advantages" not in metrics and "rollout/rewards" not in metrics
    assert metrics["rollout/raw_reward"] == 1.25


def test_the_overlong_penalty_is_of_the_longest_sibling_and_leaves_raw_rewards_alone():
    groups = [
        Group(0, [sample(0, 0, 1.0, trajectory_id=8), sample(0, 1, 1.0, response=(3, 4, 5, 6), trajectory_id=8)]),
    ]
    groups[0].samples.append(sample(0, 2, 0.0))
    algo = AlgoConfig(advantage_estimator="grpo", disable_rewards_normalization=True, overlong_buffer_len=2)
    batch, metrics = make(groups, algo=algo, global_batch_size=2, max_response_len=4)
    assert batch.advantages.tolist() == [0, 0, 0] and batch.rewards.tolist() == [1, 1, 0]
    assert metrics["rollout/overlong_penalty"] == -0.5 and metrics["rollout/raw_reward"] == 0.5
    with pytest.raises(ConfigError, match="--rollout-max-response-len"):
        make(groups, algo=algo, global_batch_size=2)


@pytest.mark.parametrize(
    ("algo", "sums"),
    [
        (dict(loss_agg_mode="token-mean"), [2 / 3, 1 / 3, 2 / 5, 3 / 5]),
        (dict(calculate_per_token_loss=True), [2 / 3, 1 / 3, 2 / 5, 3 / 5]),
        (dict(loss_agg_mode="seq-mean-token-mean"), [1 / 2] * 4),
        (dict(loss_agg_mode="seq-mean-token-sum"), [2 / 2, 1 / 2, 2 / 2, 3 / 2]),
        (dict(advantage_estimator="dr_grpo", loss_agg_length=8), [2 / 16, 1 / 16, 2 / 16, 3 / 16]),
    ],
)
def test_aggregations_by_name_in_two_steps(algo, sums):
    batch, _ = make(two_groups(), algo=AlgoConfig(**algo), global_batch_size=2)
    cu = batch.cu_seqlens
    for name, want in ((batch.loss_weights, sums), (batch.extra["metric_weights"], [1 / 2] * 4)):
        np.testing.assert_allclose([name[a:b].sum() for a, b in pairwise(cu)], want, rtol=1e-6)
    assert "metric_weights" not in make(two_groups())[0].extra


def test_a_constant_length_must_be_there():
    with pytest.raises(ConfigError, match="--loss-agg-length"):
        make(two_groups(), algo=AlgoConfig(advantage_estimator="dr_grpo"))
