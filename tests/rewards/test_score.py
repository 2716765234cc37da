"""The run's reward function: who scores a sample, and what becomes of unusable rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vime.config import Config, RewardConfig
from vime.errors import ConfigError, DataError, RewardError
from vime.protocols import RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.score import Scorer, check_reward, make_reward_function, scalar_reward, score_samples
from vime.types import Sample, SampleStatus

HERE = "tests.rewards.test_score"


async def length_reward(config: RolloutContext, sample: Sample) -> Any:
    """Scores by length; some responses make it misbehave."""
    if sample.response == "raise":
        raise KeyError("oops")
    return {"nan": math.nan, "text": "1.0", "dict": {"acc": 1, "len": 0.5}, "none": None, "numpy": np.float32(2)}.get(
        sample.response, float(len(sample.response))
    )


async def group_reward(config: RolloutContext, samples: list[Sample]) -> Any:
    """Scores a group by rank."""
    if samples[0].response == "raise":
        raise KeyError("oops")
    if samples[0].response == "short":
        return [1.0]
    return [float(i) if s.response != "nan" else math.nan for i, s in enumerate(samples)]


def not_async(config: RolloutContext, sample: Sample) -> float:
    """Not usable: rewards are awaited."""
    return 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    pool = GraderPool()
    yield pool
    pool.close()


def context(reward: Any, **settings: Any) -> RolloutContext:
    return RolloutContext(Config(reward=RewardConfig(**settings)), engines=None, tokenizer=None, reward=reward)  # type: ignore[arg-type]


def score(pool: GraderPool, samples: list[Sample], **settings: Any) -> list[Sample]:
    reward = make_reward_function(RewardConfig(**settings), pool)
    asyncio.run(score_samples(context(reward, **settings), samples))
    return samples


def sample(response: str, label: Any = "4", **fields: Any) -> Sample:
    return Sample(response=response, label=label, status=SampleStatus.COMPLETED, **fields)


def test_built_in_rewards_set_reward_and_verdict(pool: GraderPool) -> None:
    samples = score(pool, [sample(r"\boxed{4}"), sample(r"\boxed{\frac{8}{2}}"), sample("4")], rm_type="math")
    assert [s.reward for s in samples] == [1.0, 1.0, 0.0]
    assert [s.metadata["reward_verdict"] for s in samples] == ["correct", "correct", "unparseable"]
    assert all(s.status is SampleStatus.COMPLETED for s in samples)


def test_a_samples_own_reward_type_wins(pool: GraderPool) -> None:
    samples = [sample("#### 4", metadata={"rm_type": "gsm8k"}), sample("#### 4")]
    assert [s.reward for s in score(pool, samples, rm_type="exact_match")] == [1.0, 0.0]
    samples = [sample("#### 4", metadata={"rm_type": "gsm8k"}), sample("#### 4")]
    assert [s.reward for s in score(pool, samples, custom_rm_path=f"{HERE}.length_reward")] == [1.0, 6.0]


def test_rewards_already_given_and_failed_samples_are_left_alone(pool: GraderPool) -> None:
    done, failed = sample("4"), sample("4")
    done.reward, failed.status = 0.25, SampleStatus.FAILED
    score(pool, [done, failed], rm_type="exact_match")
    assert (done.reward, failed.reward) == (0.25, None)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("raise", "length_reward raised KeyError: 'oops'"),
        ("nan", "the reward is nan"),
        ("text", "the reward is '1.0'"),
        ("none", "the reward is None"),
    ],
)
def test_an_unusable_custom_reward_fails_its_sample(pool: GraderPool, response: str, problem: str) -> None:
    bad, good = score(pool, [sample(response), sample("abc")], custom_rm_path=f"{HERE}.length_reward")
    assert bad.status is SampleStatus.FAILED
    assert problem in bad.metadata["error"]
    assert bad.reward is None
    assert (good.reward, good.status) == (3.0, SampleStatus.COMPLETED)


def test_dict_rewards_are_kept_and_must_hold_the_key(pool: GraderPool) -> None:
    path = f"{HERE}.length_reward"
    (good,) = score(pool, [sample("dict")], custom_rm_path=path, reward_key="acc")
    assert good.reward == {"acc": 1.0, "len": 0.5}
    (bad,) = score(pool, [sample("dict")], custom_rm_path=path, reward_key="acuracy")
    assert bad.status is SampleStatus.FAILED
    assert "no 'acuracy' (--reward-key); it has ['acc', 'len']" in bad.metadata["error"]


def test_group_rewards_score_a_whole_group(pool: GraderPool) -> None:
    settings: dict[str, Any] = {"custom_rm_path": f"{HERE}.group_reward", "group_rm": True}
    samples = score(pool, [sample("a"), sample("nan"), sample("c")], **settings)
    assert [s.reward for s in samples] == [0.0, None, 2.0]
    assert [s.status for s in samples].count(SampleStatus.FAILED) == 1
    for response, problem in (("raise", "raised KeyError"), ("short", "1 rewards for 2 samples")):
        samples = score(pool, [sample(response), sample("b")], **settings)
        assert all(s.status is SampleStatus.FAILED and problem in s.metadata["error"] for s in samples)


def test_wrong_settings_are_all_refused_at_once(pool: GraderPool) -> None:
    with pytest.raises(ConfigError) as caught:
        make_reward_function(RewardConfig(rm_type="maths", custom_rm_path=f"{HERE}.not_async"), pool)
    assert "did you mean math?" in str(caught.value)
    assert "must be an `async def`" in str(caught.value)
    with pytest.raises(ConfigError, match="--group-rm needs --custom-rm-path"):
        make_reward_function(RewardConfig(group_rm=True), pool)


def test_samples_that_nothing_can_score_stop_the_run(pool: GraderPool) -> None:
    with pytest.raises(DataError, match="neither --rm-type nor --custom-rm-path"):
        score(pool, [sample("4")])
    with pytest.raises(DataError, match="no reward is called 'mth'; did you mean math"):
        score(pool, [sample("4", metadata={"rm_type": "mth"})])
    with pytest.raises(DataError, match="no label for the math grader"):
        score(pool, [sample("4", label=None)], rm_type="math")


def test_a_single_sample_can_be_scored_by_hooks(pool: GraderPool) -> None:
    reward = make_reward_function(RewardConfig(rm_type="exact_match"), pool)
    assert asyncio.run(reward(context(reward), sample("4"))) == 1.0
    custom = make_reward_function(RewardConfig(custom_rm_path=f"{HERE}.length_reward"), pool)
    with pytest.raises(RewardError, match="raised KeyError"):
        asyncio.run(custom(context(custom), sample("raise")))
    group = Scorer(RewardConfig(custom_rm_path="x.y", group_rm=True), pool, group_reward)
    with pytest.raises(RewardError, match="scores whole groups"):
        asyncio.run(group(context(group), sample("x")))


def test_a_plain_function_may_stand_in_for_the_reward(pool: GraderPool) -> None:
    samples = [sample("abc"), sample("nan")]
    asyncio.run(score_samples(context(length_reward), samples))
    assert samples[0].reward == 3.0
    assert samples[1].status is SampleStatus.FAILED


def test_graders_that_cannot_run_are_no_samples_fault() -> None:
    pool = GraderPool()
    pool.close()
    with pytest.raises((RewardError, RuntimeError)):
        score(pool, [sample(r"\boxed{\frac{8}{2}}")], rm_type="math")


def test_check_reward_and_scalar_reward() -> None:
    assert check_reward(np.float32(0.5), None) == 0.5
    assert check_reward(True, None) == 1.0
    with pytest.raises(RewardError, match="empty dict"):
        check_reward({}, None)
    assert scalar_reward({"a": 1.0}, "a") == 1.0
    for reward, key in ((None, None), ({"a": 1.0}, None), ({"a": 1.0}, "b")):
        with pytest.raises(RewardError):
            scalar_reward(reward, key)
