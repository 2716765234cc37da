"""Rollouts in fixed batches, on engines that are not real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes import FakeEngines, char_tokenizer, seeded_digits
from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.errors import ConfigError, EngineError
from vime.protocols import GenerateRequest, RolloutContext
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import Sample

TOKENIZER = char_tokenizer()


async def label_is_even(config: RolloutContext, sample: Sample) -> float:
    return 1.0


def keep_even(config: RolloutContext, samples: Sequence[Sample]) -> bool:
    return int(str(samples[0].label)) % 2 == 0


def context(engines: FakeEngines, **rollout: object) -> RolloutContext:
    made = RolloutConfig(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        rollout_max_response_len=8,
        deterministic=True,
        **rollout,  # type: ignore[arg-type]
    )
    config = Config(rollout=made, data=DataConfig(), reward=RewardConfig())
    return RolloutContext(config, engines, TOKENIZER, label_is_even)


def source(metadata: dict[str, str] | None = None) -> DataBuffer:
    prompts = [Prompt(prompt=f"{i}", tokens=(2 + i,), label=str(i), metadata=metadata or {}) for i in range(10)]
    return DataBuffer(prompts, n_samples_per_prompt=2, shuffle=False, seed=0)


def shaken(seed: int) -> FakeEngines:
    """Engines whose answers come in an order of chance."""
    dice = random.Random(seed)

    async def before(request: GenerateRequest) -> None:
        for _ in range(dice.randrange(9)):
            await asyncio.sleep(0)

    return FakeEngines(seeded_digits(TOKENIZER), before)


def test_groups_come_in_batches_of_what_is_missing_whatever_ends_first() -> None:
    found = []
    for seed in range(5):
        engines = shaken(seed)
        where = f"{__name__}.keep_even"
        result = generate_rollout(context(engines, dynamic_sampling_filter_path=where), 3, source(), engines)
        places = sorted((r.batch[0], r.batch[2], r.batch[1], r.token_ids) for r in engines.requests if r.batch)
        found.append((places, [(g.group_id, [s.tokens for s in g.samples]) for g in result.groups]))
    assert all(other == found[0] for other in found)
    places, groups = found[0]
    assert [(name, index, size) for name, index, size, _ in places] == [
        *(("rollout-3-0", i, 8) for i in range(4)),  # 0 and 2 are kept
        *(("rollout-3-1", i, 4) for i in range(2)),  # 4 is kept
        ("rollout-3-2", 0, 2),  # 6 is kept
    ] and [group_id for group_id, _ in groups] == [0, 2, 4, 6]


def test_a_batch_is_no_larger_than_the_requests_that_may_be_in_flight() -> None:
    engines = shaken(0)
    generate_rollout(context(engines, rollout_concurrency=3), 0, source(), engines)
    assert sorted({r.batch[:2] for r in engines.requests if r.batch}) == [
        ("rollout-0-0", 6),
        ("rollout-0-1", 2),
    ]


def test_a_request_that_fails_ends_the_run_and_is_not_replaced() -> None:
    async def before(request: GenerateRequest) -> None:
        if request.batch is not None and request.batch[2] == 2:
            raise EngineError("the engine is gone")

    engines = FakeEngines(seeded_digits(TOKENIZER), before)
    with pytest.raises(EngineError, match=r"group 2 could not be generated \(the engine is gone\).*resume"):
        generate_rollout(context(engines), 0, source(), engines)


def test_a_row_with_a_generate_function_is_refused(tmp_path: Path) -> None:
    engines = shaken(0)
    rows = source({"generate_function_path": "tests.rollout.hooks.two_turns"})
    with pytest.raises(ConfigError, match=r"its row names a generate function"):
        generate_rollout(context(engines), 0, rows, engines)
