"""Weights that change under samples of a real engine: each span is of the version that it names."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.weight_sync.hf_trainer import HfTrainer
from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.engine.vllm.versions import KNOWN, VllmAdapter, adapter_for
from vime.protocols import RolloutContext
from vime.rollout.stage import RolloutStage
from vime.rollout.stale import StaleGroups
from vime.rollout.stream import RolloutStream, StreamLimits
from vime.types import Sample
from vime.weight_sync import shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance

pytestmark = pytest.mark.engine

BATCH, LENGTH = 3, 380
WAIT_S = 300


async def no_reward(config: RolloutContext, sample: Sample) -> float:
    return float(sample.sample_id % 2)


def publisher(trainer: HfTrainer, control: VllmEngine, client: RouterClient) -> WeightSync:
    return WeightSync(
        trainer,  # type: ignore[arg-type]
        [control],
        transport="shm",
        probe_prompts=[[10, 20, 30, 40]],
        probe_interval=1,
        probe_tolerance=ProbeTolerance(1e-4),
        on_version=client.note_version,
    )


@pytest.mark.parametrize("adapter", [adapter_for(), KNOWN[0, 26]], ids=["engine_says", "client_says"])
def test_log_probs_of_each_span_are_of_the_version_that_it_names(
    engine: EngineServer, run_key: str, tiny_qwen3: Path, adapter: VllmAdapter
) -> None:
    """Two weight syncs under a rollout's samples; each span is scored by each version's weights."""
    from transformers import AutoTokenizer

    control = VllmEngine(engine.url, run_key)
    writer = shm.Writer()
    trainer = HfTrainer(tiny_qwen3, writer)
    client = RouterClient(engine.url, [engine.url], run_key, adapter)
    config = Config(
        data=DataConfig(rollout_seed=3),
        rollout=RolloutConfig(rollout_batch_size=BATCH, n_samples_per_prompt=2, rollout_max_response_len=LENGTH),
        reward=RewardConfig(custom_rm_path="unused.unused"),
    )
    source = DataBuffer(
        [Prompt(f"{i}", tuple(range(40 + i, 50 + i))) for i in range(BATCH)],
        n_samples_per_prompt=2,
        shuffle=False,
        seed=0,
    )
    context = RolloutContext(config, client, AutoTokenizer.from_pretrained(tiny_qwen3), no_reward)
    stream = RolloutStream(
        context,
        RolloutStage(context, source, {}),
        source,
        limits=StreamLimits(batch=BATCH, max_generating=BATCH, max_staleness=9, in_flight=True),
        stale=StaleGroups(9, "drop"),
        num_groups=BATCH,
    )
    sync = publisher(trainer, control, client)
    scorers = {}
    with stream:
        for version in (1, 2, 3):
            if version > 1:
                stream.pause()  # first, or the samples may be at their end before the next weights are there
            trainer.perturb(version)
            scorers[version] = HfTrainer(tiny_qwen3, writer)
            scorers[version].model.load_state_dict(trainer.model.state_dict())
            sync.publish(version)
            before = control.stats().sampled_tokens
            if version > 1:
                stream.resume(version)
            else:
                stream.start(0, version)
            deadline = time.monotonic() + WAIT_S
            while version < 3 and control.stats().sampled_tokens < before + 5 * BATCH:
                assert time.monotonic() < deadline, "the engine samples nothing by these weights"
        samples = [sample for group in stream.take(0).groups for sample in group.samples]
    sync.close()
    restore = publisher(HfTrainer(tiny_qwen3, writer), control, client)
    restore.publish()
    restore.close()
    writer.close()
    control.close()
    assert {span.version for sample in samples for span in sample.weight_versions} == {1, 2, 3}
    for sample in samples:
        assert sum(span.end - span.start for span in sample.weight_versions) == sample.response_length
        first = len(sample.prompt_tokens)
        for version, scorer in scorers.items():
            apart = np.abs(np.array(sample.rollout_log_probs) - scorer.score([sample.tokens])[0][first:])
            for span in sample.weight_versions:
                if span.version == version:
                    assert apart[span.start : span.end].max() < 1e-5, (span, version)
                elif span.end - span.start > 5:
                    assert apart[span.start : span.end].max() > 1e-3, "another version's would not be told apart"
