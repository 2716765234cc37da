"""Rollouts on other sources than the buffer over files."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import FakeEngines, seeded_digits
from tests.rollout.bench import HOOKS, Bench, ids
from vime.data.buffer import DataBuffer, new_group
from vime.data.prompt_set import Prompt
from vime.errors import DataError
from vime.protocols import DataSource
from vime.rewards.pool import GraderPool
from vime.rollout.stage import RolloutStage
from vime.types import Group


def test_a_generate_function_makes_its_own_prompts(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.own_prompt", reward={})
    bench.source = DataBuffer(None, n_samples_per_prompt=2, shuffle=False, seed=0)
    result = bench.run()
    assert ids(result) == [0, 1, 2, 3]
    samples = [sample for group in result.groups for sample in group.samples]
    assert [s.sample_id for s in samples] == list(range(8)) == [s.trajectory_id for s in samples]
    assert [s.prompt_tokens for s in samples] == [(9, s.sample_id) for s in samples]
    assert [g.group_id for g in bench.run(1).groups] == [4, 5, 6, 7]


class Countdown(DataSource):
    """Prompts of its own, fewer and fewer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._count, self.rollouts = tokenizer, 0, []

    def get_groups(self, n: int) -> list[Group]:
        self._count += n
        ids = range(self._count - n, self._count if self._count < 9 else 9)
        return [self._group(i) for i in ids]

    def _group(self, i: int) -> Group:
        tokens = tuple(self._tokenizer(f"{i}=", add_special_tokens=False)["input_ids"])
        return new_group(Prompt(f"{i}=", tokens, label=str(i)), group_id=i, first_sample_id=2 * i, n_samples=2)

    def put_back(self, groups: Any) -> None:
        assert not groups, "nothing is over-sampled here"

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...

    def epoch_size(self) -> int | None:
        return None

    def begin_rollout(self, config: Any, rollout_id: int) -> None:
        self.rollouts.append((config.tokenizer, rollout_id))

    def metrics(self) -> dict[str, float]:
        return {"custom/count": self._count}


def test_the_default_rollout_takes_any_source(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool)
    source = Countdown(tokenizer)
    stage = RolloutStage(bench.context, source, {})
    result = stage.generate(5)
    assert ids(result) == [0, 1, 2, 3]
    assert result.metrics["custom/count"] == 4 and "rollout/raw_reward" in result.metrics
    assert source.rollouts == [(tokenizer, 5)]
    stage.generate(6)
    with pytest.raises(DataError, match=r"Countdown\.get_groups\(4\) returned 1 groups; a source that comes to"):
        stage.generate(7)


def test_a_row_is_generated_and_scored_as_its_metadata_says(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer)))
    for prompt in bench.source.prompts[:2]:
        prompt.metadata["generate_function_path"] = f"{HOOKS}.own_prompt"
    samples = [sample for group in bench.run().groups for sample in group.samples]
    assert [s.prompt_tokens[0] == 9 for s in samples] == [True] * 4 + [False] * 4
