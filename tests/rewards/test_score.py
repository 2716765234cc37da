"""The run's reward function: who scores a sample, and what becomes of unusable rewards."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vime.config import Config, RewardConfig
from vime.errors import ConfigError, DataError, RewardError
from vime.protocols import RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.score import check_reward, default_reward_keys, make_reward_function, scalar_reward, score_samples
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


def plain(config: RolloutContext, sample: Sample) -> Any:
    """Runs in a grader process; some responses make it misbehave."""
    if sample.response == "hang":
        while True:
            pass
    if sample.response == "exit":
        os._exit(3)
    if sample.response == "eat memory":
        return bytes(8 << 30)
    if sample.response == "raise":
        raise KeyError("oops")
    if sample.response == "engines":
        return config.engines.generate(None)  # type: ignore[arg-type]
    print("9.0")
    values = {"nan": math.nan, "numpy": np.float32(2), "object": object(), "none": None, "dict": {"acc": np.int64(1)}}
    sample.metadata["seen"] = True  # of its own copy
    return values.get(sample.response, len(sample.response) + config.config.reward.rm_num_workers)


def plain_group(config: RolloutContext, samples: list[Sample]) -> Any:
    """The group form of it."""
    return [plain(config, s) for s in samples]


def short_format(config: RolloutContext, sample: Sample) -> float:
    """A part: half a point for few characters."""
    return 0.5 * (len(sample.response) < 20)


async def slow(config: RolloutContext, sample: Sample) -> float:
    """Never ends for one response."""
    if sample.response == "late":
        await asyncio.sleep(3600)
    return 1.0


def one_argument(config: RolloutContext) -> float:
    """Not usable."""
    return 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    """With time for everything that ends, however busy the machine is."""
    pool = GraderPool(timeout_s=120.0)
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
        make_reward_function(RewardConfig(rm_type="maths", custom_rm_path=f"{HERE}.one_argument"), pool)
    assert "did you mean math?" in str(caught.value)
    assert "is called with (config, sample)" in str(caught.value)
    with pytest.raises(ConfigError, match="--group-rm needs --custom-rm-path"):
        make_reward_function(RewardConfig(group_rm=True), pool)


def test_samples_that_nothing_can_score_stop_the_run(pool: GraderPool) -> None:
    with pytest.raises(DataError, match="neither --rm-type, --rm-parts nor --custom-rm-path"):
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
    group = make_reward_function(RewardConfig(custom_rm_path=f"{HERE}.group_reward", group_rm=True), pool)
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


def test_a_plain_function_runs_in_a_process_that_may_be_killed(pool: GraderPool) -> None:
    impatient = GraderPool(timeout_s=2.0)
    (hung,) = score(impatient, [sample("hang")], custom_rm_path=f"{HERE}.plain")
    impatient.close()
    deeds = ["abc", "exit", "eat memory", "raise", "nan", "object", "none", "engines", "numpy", "abcd"]
    samples = score(pool, [sample(deed) for deed in deeds], custom_rm_path=f"{HERE}.plain")
    samples.insert(1, hung)
    assert [s.reward for s in samples] == [4.0, *[None] * 8, 2.0, 5.0]
    problems = [s.metadata.get("error", "") for s in samples[1:9]]
    for problem, words in zip(
        problems,
        [
            "took more than 2 s (--rm-timeout-s) and was killed",
            "crashed",
            "crashed",
            "raised KeyError: 'oops' (test_score.py, line",
            "gave what is no reward: the reward is nan",
            "a finite number is expected",
            "the reward is None",
            "config.engines is not there",
        ],
        strict=True,
    ):
        assert words in problem
    assert [s.metadata.get("reward_verdict") for s in samples[1:4]] == ["timeout", "crashed", "crashed"]
    assert "seen" not in samples[0].metadata


def test_a_plain_function_may_score_groups_and_give_dicts(pool: GraderPool) -> None:
    samples = score(pool, [sample("a"), sample("nan")], custom_rm_path=f"{HERE}.plain_group", group_rm=True)
    assert samples[0].reward == 2.0
    assert samples[1].status is SampleStatus.FAILED
    (one,) = score(pool, [sample("dict")], custom_rm_path=f"{HERE}.plain", reward_key="acc")
    assert one.reward == {"acc": 1.0}


def test_an_async_reward_has_a_time_limit(pool: GraderPool) -> None:
    settings: dict[str, Any] = {"custom_rm_path": f"{HERE}.slow", "custom_rm_timeout_s": 0.2}
    quick, late = score(pool, [sample("quick"), sample("late")], **settings)
    assert quick.reward == 1.0
    assert late.status is SampleStatus.FAILED
    assert late.metadata["reward_verdict"] == "timeout"
    assert "did not end within 0.2 s (--custom-rm-timeout-s); it was in test_score.py" in late.metadata["error"]


def test_a_failure_may_have_a_reward_of_its_own(pool: GraderPool) -> None:
    settings: dict[str, Any] = {"custom_rm_path": f"{HERE}.slow", "custom_rm_timeout_s": 0.2, "rm_failure_reward": -1}
    quick, late = score(pool, [sample("quick"), sample("late")], **settings)
    assert (quick.reward, late.reward) == (1.0, -1.0)
    assert late.metadata["reward_verdict"] == "timeout"
    (bug,) = score(pool, [sample("raise")], custom_rm_path=f"{HERE}.length_reward", rm_failure_reward=-1)
    assert bug.status is SampleStatus.FAILED  # an exception is a mistake of the function, not of the response


PARTS = {"math": 1.0, "dapo": 0.5, f"{HERE}.short_format": 0.1, f"{HERE}.length_reward": 0.0}


def test_parts_are_kept_beside_their_weighted_sum(pool: GraderPool) -> None:
    right, wrong = score(
        pool, [sample(r"Answer: \boxed{\frac{8}{2}}"), sample("5")], rm_parts=PARTS, reward_key="total"
    )
    assert right.reward == {
        "math": 1.0,
        "dapo": 1.0,
        "short_format": 0.0,
        "length_reward": 27.0,
        "total": 1.5,
    }
    assert isinstance(wrong.reward, dict)
    assert wrong.reward["total"] == pytest.approx(0.0 - 0.5 + 0.05)
    assert [s.metadata["reward_verdict"] for s in (right, wrong)] == ["correct", "unparseable"]
    assert default_reward_keys(RewardConfig(rm_parts=PARTS)) == ("total", "total")


def test_a_part_that_fails_fails_its_sample_by_name(pool: GraderPool) -> None:
    bad, dict_part = score(pool, [sample("raise"), sample("dict")], rm_parts=PARTS, reward_key="total")
    assert "part length_reward" in bad.metadata["error"]
    assert "a part is one number" in dict_part.metadata["error"]


def test_parts_of_built_ins_need_no_process() -> None:
    pool = GraderPool()
    parts = {"exact_match": 1.0, "f1": 0.5}
    (one,) = score(pool, [sample("4")], rm_parts=parts, reward_key="total")
    assert one.reward == {"exact_match": 1.0, "f1": 1.0, "total": 1.5}
    assert not pool._workers
    pool.close()


def test_wrong_parts_are_refused(pool: GraderPool) -> None:
    with pytest.raises(ConfigError) as caught:
        make_reward_function(RewardConfig(rm_parts={"maths": 1.0, f"{HERE}.nothing": 1.0}), pool)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="finds the answer itself; drop boxed_"):
        make_reward_function(RewardConfig(rm_type="boxed_math"), pool)
    with pytest.raises(ConfigError, match="give its address by --rm-url"):
        make_reward_function(RewardConfig(rm_type="remote_rm"), pool)


def test_dapo_gives_its_accuracy_beside_the_score(pool: GraderPool) -> None:
    samples = score(pool, [sample("Answer: 4"), sample("4")], rm_type="dapo", reward_key="score")
    assert [s.reward for s in samples] == [{"score": 1.0, "acc": 1.0}, {"score": -1.0, "acc": 0.0}]
    assert default_reward_keys(RewardConfig(rm_type="dapo")) == ("score", "acc")
    assert default_reward_keys(RewardConfig(rm_type="dapo", reward_key="acc")) == ("acc", "acc")
    assert default_reward_keys(RewardConfig(rm_type="math")) == (None, None)


def test_a_samples_own_function_wins_over_everything(pool: GraderPool) -> None:
    own = {"custom_rm_path": f"{HERE}.length_reward", "rm_type": "gsm8k"}
    settings: dict[str, Any] = {"custom_rm_path": f"{HERE}.group_reward", "group_rm": True}
    samples = score(pool, [sample("abc", metadata=own), sample("x"), sample("y")], **settings)
    assert [s.reward for s in samples] == [3.0, 0.0, 1.0]
    with pytest.raises(DataError, match=r"metadata.custom_rm_path: 'no.such.fn': importing"):
        score(pool, [sample("a", metadata={"custom_rm_path": "no.such.fn"})])
