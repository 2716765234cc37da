"""A partial rollout on a real engine: what is gone on with is conditioned on the tokens it had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.server import EngineServer
from vime.protocols import RolloutContext
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import Sample, SampleStatus

pytestmark = pytest.mark.engine


async def no_reward(config: RolloutContext, sample: Sample) -> float:
    return float(sample.sample_id % 2)


def test_responses_cut_off_by_an_abort_are_gone_on_with(engine: EngineServer, run_key: str, tiny_qwen3: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    # The first has little room in the context, so it ends while the others are under way.
    prompts = [Prompt(f"{i}", tuple(range(40 + i, 60 + i)) * (19 if i == 0 else 1)) for i in range(4)]
    source = DataBuffer(prompts, n_samples_per_prompt=2, shuffle=False, seed=0)
    client = RouterClient(engine.url, [engine.url], run_key)

    def rollout(rollout_id: int, batch: int) -> tuple[list[Sample], dict[str, float]]:
        config = Config(
            data=DataConfig(rollout_seed=3),
            rollout=RolloutConfig(
                rollout_batch_size=batch,
                over_sampling_batch_size=batch if rollout_id else 4,
                n_samples_per_prompt=2,
                rollout_max_response_len=380,
                rollout_max_context_len=400,
                partial_rollout=True,
            ),
            reward=RewardConfig(custom_rm_path="unused.unused"),
        )
        context = RolloutContext(config, client, tokenizer, no_reward)
        result = generate_rollout(context, rollout_id, source, client)
        return [sample for group in result.groups for sample in group.samples], result.metrics

    _, metrics = rollout(0, 1)
    assert metrics["rollout/num_put_back"] == 3
    waiting = source.get_groups(3)
    before = {s.sample_id: s for group in waiting for s in group.samples}
    begun = {i: s.tokens for i, s in before.items()}
    cut_off = [i for i, s in before.items() if s.status is SampleStatus.ABORTED and s.response_length > 1]
    assert cut_off, [(s.status, s.response_length) for s in before.values()]
    source.put_back(waiting)
    samples, metrics = rollout(1, 3)
    assert metrics["rollout/num_continued_groups"] == 3
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3).float()
    for sample in samples:
        had = begun[sample.sample_id]
        assert sample.tokens[: len(had)] == had
        assert len(sample.tokens) > len(had) or sample.sample_id not in cut_off
        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(sample.rollout_log_probs, log_probs[-sample.response_length :], atol=1e-5)
    asyncio.run(client.aclose())
