"""Rollouts on other sources than the buffer over files."""

from __future__ import annotations

from typing import Any

from tests.fakes import FakeEngines, seeded_digits
from tests.rollout.bench import HOOKS, Bench, ids
from vime.data.buffer import DataBuffer
from vime.rewards.pool import GraderPool


def test_a_generate_function_makes_its_own_prompts(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.own_prompt", reward={})
    bench.source = DataBuffer(None, n_samples_per_prompt=2, shuffle=False, seed=0)
    result = bench.run()
    assert ids(result) == [0, 1, 2, 3]
    samples = [sample for group in result.groups for sample in group.samples]
    assert [s.sample_id for s in samples] == list(range(8)) == [s.trajectory_id for s in samples]
    assert [s.prompt_tokens for s in samples] == [(9, s.sample_id) for s in samples]
    assert [g.group_id for g in bench.run(1).groups] == [4, 5, 6, 7]


def test_a_row_is_generated_and_scored_as_its_metadata_says(tokenizer: Any, pool: GraderPool) -> None:
    bench = Bench(tokenizer, pool, FakeEngines(seeded_digits(tokenizer)))
    for prompt in bench.source.prompts[:2]:
        prompt.metadata["generate_function_path"] = f"{HOOKS}.own_prompt"
    samples = [sample for group in bench.run().groups for sample in group.samples]
    assert [s.prompt_tokens[0] == 9 for s in samples] == [True] * 4 + [False] * 4
