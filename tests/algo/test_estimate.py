"""Every estimator of the table: what holds for all of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.advantages import AdvantageInputs
from vime.algo.estimate import estimate, estimator_function
from vime.config.estimators import ESTIMATORS, LOSS_AGG_MODES, PG_LOSS_TYPES

NAMES = sorted(name for name in ESTIMATORS if name != "ppo")
COMPARING = [name for name in NAMES if ESTIMATORS[name].compares_groups]


def rollout(rewards, group_ids, *, lengths=None, masked=(), **settings):
    """One trajectory a sample, the first token of each its prompt; samples in `masked` have no token under mask 1."""
    n = len(rewards)
    lengths = np.full(n, 3) if lengths is None else np.asarray(lengths)
    mask = np.ones(int(lengths.sum()))
    cu = np.concatenate([[0], np.cumsum(lengths)])
    mask[cu[:-1]] = 0
    for i in masked:
        mask[cu[i] : cu[i + 1]] = 0
    return AdvantageInputs(
        **{
            "rewards": np.asarray(rewards, np.float64),
            "group_ids": np.asarray(group_ids),
            "trajectory_ids": np.arange(n),
            "cu_seqlens": cu,
            "mask": mask,
            **settings,
        }
    )


def per_token(name, inputs):
    """[T] 0 under mask 0, whatever the estimator gives."""
    got = estimate(name, inputs, whitened=ESTIMATORS[name].whitens)
    if got.per_token is not None:
        return got.per_token
    return np.where(inputs.mask != 0, np.repeat(got.per_sample, np.diff(inputs.cu_seqlens)), 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_names_functions_and_losses_that_exist(name):
    row = ESTIMATORS[name]
    assert callable(estimator_function(name))
    assert row.pg_loss_type in (None, *PG_LOSS_TYPES) and row.loss_agg_mode in (None, *LOSS_AGG_MODES)


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_and_groups_of_one_teach_nothing(name):
    assert not per_token(name, rollout([0.1] * 3 + [0.7] * 4 + [5.0], [0] * 3 + [1] * 4 + [2])).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_number(name, reward):
    with pytest.raises(ValueError, match="the reward of sample 1 is"):
        estimate(name, rollout([1.0, reward, 0.0], [0, 0, 0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_penalty_that_is_not_finite_is_refused_where_it_counts(name):
    inputs = rollout([1.0, 0.0], [0, 0], token_penalties=np.array([np.nan, 0.1, 0.2, np.nan, 0.3, 0.4]))
    assert np.isfinite(per_token(name, inputs)).all()
    inputs.token_penalties[1] = np.nan
    with pytest.raises(ValueError, match="1 tokens under mask 1 have a penalty"):
        estimate(name, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_fully_masked_sample_counts_in_its_group_and_gets_nothing(name):
    rewards, groups = [1.0, 0.0, 0.5, 0.0], [0, 0, 0, 1]
    got = per_token(name, rollout(rewards, groups, masked=[1]))
    assert np.isfinite(got).all() and not got[3:6].any()
    if not ESTIMATORS[name].whitens:
        everyone = per_token(name, rollout(rewards, groups))
        np.testing.assert_allclose(got[:3], everyone[:3])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_under_mask_one_at_all(name):
    assert not per_token(name, rollout([1.0, 0.0], [0, 0], masked=[0, 1])).any()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_the_order_of_samples_changes_nothing(name, data):
    n = data.draw(st.integers(2, 7))
    lengths = data.draw(st.lists(st.integers(2, 5), min_size=n, max_size=n))
    rewards = data.draw(st.lists(st.integers(-3, 3).map(float), min_size=n, max_size=n))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    penalties = np.array(data.draw(st.lists(st.integers(-2, 4), min_size=sum(lengths), max_size=sum(lengths)))) / 10
    order = data.draw(st.permutations(range(n)))
    plain = rollout(rewards, groups, lengths=lengths, token_penalties=penalties, gamma=0.9)
    rows = [slice(a, b) for a, b in zip(plain.cu_seqlens, plain.cu_seqlens[1:], strict=False)]
    take = np.concatenate([np.arange(rows[i].start, rows[i].stop) for i in order])
    moved = rollout(
        [rewards[i] for i in order],
        [groups[i] for i in order],
        lengths=[lengths[i] for i in order],
        token_penalties=penalties[take],
        gamma=0.9,
    )
    np.testing.assert_allclose(per_token(name, moved), per_token(name, plain)[take], atol=1e-7)


@pytest.mark.parametrize("name", [n for n in NAMES if not ESTIMATORS[n].discounts])
def test_splitting_a_trajectory_into_siblings_changes_nobody_elses_advantage(name):
    whole = rollout([1.0, 0.0, 0.0], [0, 0, 0], lengths=[5, 3, 3])
    split = replace(
        whole,
        rewards=np.array([1.0, 1.0, 0.0, 0.0]),
        group_ids=np.zeros(4, np.int64),
        trajectory_ids=np.array([7, 7, 8, 9]),
        cu_seqlens=np.array([0, 3, 5, 8, 11]),
    )
    np.testing.assert_allclose(per_token(name, split), per_token(name, whole))


def test_rloo_compares_with_the_others_alone():
    # 3 - mean(1, 2) = 1.5, 1 - mean(3, 2) = -1.5, 2 - mean(3, 1) = 0.
    assert estimate("rloo", rollout([3.0, 1.0, 2.0], [4, 4, 4])).per_sample.tolist() == [1.5, -1.5, 0]


def test_penalties_are_taken_from_rewards_before_they_are_compared():
    # Rewards 1 - (0.2 + 0.3) = 0.5 and 0: centred 0.25 and -0.25.
    inputs = rollout([1.0, 0.0], [0, 0], token_penalties=np.array([9.0, 0.2, 0.3, 9.0, 0.0, 0.0]))
    np.testing.assert_allclose(estimate("dr_grpo", inputs).per_sample, [0.25, -0.25])
    np.testing.assert_allclose(estimate("grpo", inputs, raw=True).per_sample, [0.5, 0.0])


def test_a_return_is_the_discounted_sum_of_what_follows():
    inputs = rollout([2.0, 0.0], [0, 1], token_penalties=np.array([0, 0.1, 0.2, 0, 0, 0]), gamma=0.5)
    # Last token: 2 - 0.2; before it: -0.1 + 0.5 * 1.8.
    np.testing.assert_allclose(estimate("reinforce_plus_plus", inputs).per_token, [0, 0.8, 1.8, 0, 0, 0])


def test_whitening_is_over_tokens():
    got = estimate("grpo", rollout([1.0, 0.0], [0, 0], lengths=[2, 4]), whitened=True).per_token
    counted = got[[1, 3, 4, 5]]
    assert counted.mean() == pytest.approx(0, abs=1e-12) and counted.std(ddof=1) == pytest.approx(1, rel=1e-6)
    assert not got[[0, 2]].any()


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="2 samples of 6 tokens"):
        estimate("grpo", rollout([1.0, 0.0], [0, 0], mask=np.ones(5)))
    with pytest.raises(ValueError, match="token_penalties has shape"):
        estimate("grpo", rollout([1.0, 0.0], [0, 0], token_penalties=np.zeros(5)))
