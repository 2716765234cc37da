"""Under top-p, top-k and min-p the trainer gives the log-probs that the engine sampled with: over its support."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.agreement.scores import megatron
from vime.agreement.analysis import Means
from vime.agreement.compare import analyse_samples
from vime.config import AlgoConfig, Config, RolloutConfig, TrainConfig
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.server import EngineServer
from vime.engine.vllm.supports import most_entries
from vime.loop.batch import make_train_batch
from vime.platform.cpu import CpuPlatform
from vime.rollout.generate import generate_group, rollout_sampling
from vime.types import Group, Sample, SampleStatus, TrainBatch

pytestmark = pytest.mark.engine

DIFF = "train/train_rollout_logprob_abs_diff"
TOOL = (7, 8, 9)


class NoText:
    """Stands in for a tokenizer: nobody reads the responses."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return ""


def two_turns(engine: EngineServer, key: str, rollout: RolloutConfig) -> list[Group]:
    """Two groups of a shared request each, then a tool's tokens, then a request for each sample that goes on."""
    limit = most_entries(rollout.rollout_top_k, 10_000)
    sampling = rollout_sampling(Config(rollout=rollout))

    async def run() -> list[Group]:
        client = RouterClient(engine.url, [engine.url], key, support_limit=limit)
        groups = [
            Group(
                i, [Sample(tokens=prompt, group_id=i, sample_id=2 * i + k, trajectory_id=2 * i + k) for k in range(2)]
            )
            for i, prompt in enumerate([(5, 9, 11), tuple(range(20, 40))])
        ]
        try:
            for turn in range(2):
                for group in groups:
                    await generate_group(
                        client,
                        group,
                        lambda i, turn=turn: replace(sampling, max_tokens=12 + 27 * turn, seed=i, ignore_eos=True),
                        request_id=f"{turn}-{group.group_id}",
                        tokenizer=NoText(),
                    )
                    for sample in group.samples:
                        sample.append_response(TOOL, trainable=False)
                        sample.status, sample.reward = SampleStatus.ABORTED, float(sample.sample_id % 2)
        finally:
            await client.aclose()
        return groups

    return asyncio.run(run())


def one_batch(groups: list[Group]) -> TrainBatch:
    for sample in (sample for group in groups for sample in group.samples):
        sample.status = SampleStatus.COMPLETED
    batch, _ = make_train_batch(
        groups,
        rollout_id=0,
        algo=AlgoConfig(),
        train=TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=200),
        dp_size=1,
        reward_key=None,
        global_batch_size=4,
        needs_support=True,
    )
    return batch


@pytest.mark.parametrize(
    "narrow",
    [{"rollout_top_p": 0.9, "rollout_top_k": 4}, {"rollout_min_p": 0.3, "rollout_top_k": 4}],
    ids=["p", "min-p"],
)
def test_the_trainer_computes_over_the_support_that_the_engine_sampled_from(
    engine: EngineServer, run_key: str, tiny_qwen3: Path, tmp_path: Path, narrow: dict[str, float]
) -> None:
    rollout = RolloutConfig(rollout_temperature=0.7, **narrow)  # type: ignore[arg-type]
    batch = one_batch(two_turns(engine, run_key, rollout))
    assert batch.support is not None
    sizes = batch.support.counts[batch.loss_mask == 1]
    assert len(sizes) == 4 * 36 and 1 <= sizes.min() < sizes.max() <= 4, "what top-p or min-p leaves differs"
    assert not batch.support.counts[batch.loss_mask == 0].any()
    with megatron(tiny_qwen3, tmp_path / "meet", rollout=rollout) as trainer:
        metrics = trainer.train(batch)
    with megatron(tiny_qwen3, tmp_path / "meet again", rollout=rollout) as trainer:
        whole = trainer.train(replace(batch, support=None))
    print(f"largest difference {metrics[f'{DIFF}_max']:.2e} nats, over the whole vocabulary {whole[f'{DIFF}_max']:.2e}")
    assert 0 < metrics[f"{DIFF}_max"] < 1e-5
    assert whole[DIFF] > 0.05 and whole[f"{DIFF}_max"] > 1e-4


def test_hf_agrees_with_both_over_the_support(engine: EngineServer, run_key: str, tiny_qwen3: Path) -> None:
    rollout = RolloutConfig(rollout_temperature=0.7, rollout_top_p=0.9, rollout_top_k=4)
    groups = two_turns(engine, run_key, rollout)
    means = Means(config=Config(rollout=rollout), platform=CpuPlatform())
    samples = [sample for group in groups for sample in group.samples]
    analysis = analyse_samples(samples, tiny_qwen3, means, max_samples=None, origin="test")
    assert {who: verdict.word for who, verdict in analysis.verdicts.items()} == dict.fromkeys(
        ("engine", "trainer"), "precision"
    )
    assert analysis.comparison.tokens.is_narrow
