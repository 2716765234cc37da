"""Weight syncs into a real engine: what must arrive, arrives; what must be caught, is caught."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.weight_sync.hf_trainer import HfTrainer, Named, wrong_checksum_of
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.errors import WeightSyncError
from vime.loop.turns import DeviceTurns
from vime.protocols import GenerateRequest, SamplingParams
from vime.weight_sync import disk, gloo, shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance
from vime.wire import BucketMessage

pytestmark = pytest.mark.engine

PROMPTS = [[10, 20, 30, 40], list(range(50, 90))]
VICTIM = "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture
def control(engine: EngineServer, run_key: str) -> Iterator[VllmEngine]:
    client = VllmEngine(engine.url, run_key)
    yield client
    client.close()


@pytest.fixture
def trainer(tiny_qwen3: Path) -> Iterator[HfTrainer]:
    writer = shm.Writer()
    yield HfTrainer(tiny_qwen3, writer)
    writer.close()


@pytest.fixture
def sync(trainer: HfTrainer, control: VllmEngine, tiny_qwen3: Path) -> Iterator[WeightSync]:
    """A sync whose engine gets the checkpoint's weights back afterwards, however the test left it."""
    sync = make_sync(trainer, control)
    yield sync
    sync.close()
    restore = make_sync(HfTrainer(tiny_qwen3, trainer.writer), control)
    restore.publish()
    restore.close()


def make_sync(trainer: HfTrainer, control: VllmEngine, transport: str = "shm") -> WeightSync:
    return WeightSync(
        trainer,  # type: ignore[arg-type]
        [control],
        transport=transport,
        probe_prompts=PROMPTS,
        probe_interval=1,
        probe_tolerance=ProbeTolerance(1e-4),
    )


def distance(control: VllmEngine, trainer: HfTrainer) -> float:
    """Largest difference between the engine's log-probs and HF's, over what the engine generates greedily."""
    probe = control.probe(PROMPTS, 32)
    sequences = [(*prompt, *c.token_ids) for prompt, c in zip(probe.prompts, probe.completions, strict=True)]
    scores = trainer.score(sequences)
    return max(
        float(np.abs(np.array(c.log_probs) - score[len(prompt) :]).max())
        for prompt, c, score in zip(probe.prompts, probe.completions, scores, strict=True)
    )


def test_log_probs_after_a_sync_by_shared_memory_are_those_of_the_new_weights(
    sync: WeightSync, trainer: HfTrainer, control: VllmEngine
) -> None:
    trainer.perturb(1)
    assert distance(control, trainer) > 0.01
    assert sync.publish() == 1
    assert distance(control, trainer) < 1e-5
    assert sync.metrics["weight_sync/buckets"] > 3
    trainer.perturb(2)
    assert sync.publish() == 2
    assert distance(control, trainer) < 1e-5
    assert {span.version for c in control.probe(PROMPTS, 4).completions for span in c.weight_versions} == {2}


class Stays:
    """A trainer that leaves no device, and is asked for nothing else."""

    def offload(self, parts: Sequence[str]) -> None: ...

    def onload(self, parts: Sequence[str]) -> None: ...

    def device_memory(self) -> None:
        return None


def test_an_engine_that_slept_is_served_by_a_sync_and_generates_again(
    sync: WeightSync, trainer: HfTrainer, control: VllmEngine
) -> None:
    """vLLM's own order: asleep, nothing runs; the weights awake, they may be loaded; all awake, it generates."""
    turns = sync._turns = DeviceTurns(Stays(), [control], trainer_leaves=True)  # type: ignore[arg-type]
    control.sleep(2)
    for seed in (1, 2):
        trainer.perturb(seed)
        sync.publish()  # probes, for which the engine sleeps once more and keeps what it got
        assert distance(control, trainer) < 1e-5
        turns.to_training(weights_follow=True)
        assert control._get("/is_paused") == {"is_paused": True}
    turns.to_generation()  # without a sync
    assert distance(control, trainer) < 1e-5
    turns.close()


def test_log_probs_after_a_sync_by_disk_are_those_of_the_new_weights(
    sync: WeightSync, trainer: HfTrainer, control: VllmEngine, tiny_qwen3: Path, tmp_path: Path
) -> None:
    writer = disk.Writer(tmp_path / "buckets")
    other = HfTrainer(tiny_qwen3, writer)
    other.perturb(3)
    by_disk = make_sync(other, control, "disk")
    by_disk.publish()
    by_disk.close()
    assert distance(control, other) < 1e-5
    writer.close()
    assert not list((tmp_path / "buckets").iterdir())


def test_a_broadcast_brings_the_new_weights_and_is_checked_like_the_others(
    sync: WeightSync, control: VllmEngine, tiny_qwen3: Path
) -> None:
    writer = gloo.Writer("127.0.0.1", 1, timeout_s=60)
    other = HfTrainer(tiny_qwen3, writer)
    by_gloo = make_sync(other, control, "gloo")
    other.perturb(8)
    other.edit = without(VICTIM)
    with pytest.raises(WeightSyncError, match=f"missing: {VICTIM}"):
        by_gloo.publish()
    other.edit = lambda stream: stream

    other.tamper = wrong_checksum_of(VICTIM)
    with pytest.raises(WeightSyncError, match=f"checksum differs for {VICTIM}"):
        by_gloo.publish()
    other.tamper = lambda bucket: bucket
    assert by_gloo.publish() == 1
    by_gloo.close()
    writer.close()
    assert distance(control, other) < 1e-5


def test_a_skipped_tensor_is_named_and_the_engine_serves_no_more(
    sync: WeightSync, trainer: HfTrainer, control: VllmEngine
) -> None:
    trainer.perturb(4)
    trainer.edit = without(VICTIM)
    with pytest.raises(WeightSyncError, match=f"missing: {VICTIM}"):
        sync.publish()
    assert sync.version == 0
    with pytest.raises(WeightSyncError, match="may not serve"):
        control.resume()
    trainer.edit = lambda stream: stream
    sync.publish()  # a complete sync makes it fit again
    assert distance(control, trainer) < 1e-5


def test_a_renamed_tensor_is_named(sync: WeightSync, trainer: HfTrainer) -> None:
    def renamed(stream: Iterator[Named]) -> Iterator[Named]:
        return ((name.replace("v_proj", "w_proj"), tensor) for name, tensor in stream)

    trainer.edit = renamed
    with pytest.raises(WeightSyncError, match=r"w_proj"):
        sync.publish()


def test_a_trainer_cannot_define_what_is_complete(sync: WeightSync, trainer: HfTrainer) -> None:
    trainer.edit = without(VICTIM)
    trainer.names = lambda names: [name for name in names if name != VICTIM]
    with pytest.raises(WeightSyncError, match=f"names differ from the checkpoint.*missing: {VICTIM}"):
        sync.publish()


def test_a_tensor_sent_twice_is_named(sync: WeightSync, trainer: HfTrainer) -> None:
    def doubled(stream: Iterator[Named]) -> Iterator[Named]:
        for name, tensor in stream:
            yield name, tensor
            if name == VICTIM:
                yield name, tensor

    trainer.edit = doubled
    with pytest.raises(WeightSyncError, match=f"twice: {VICTIM}"):
        sync.publish()


def test_a_corrupted_byte_is_named(sync: WeightSync, trainer: HfTrainer) -> None:
    def corrupt(bucket: BucketMessage) -> BucketMessage:
        for spec in bucket.tensors:
            if spec.name == VICTIM:
                with (shm.SHM_FOLDER / bucket.location["shm"]).open("r+b") as file:
                    file.seek(spec.offset + spec.num_bytes // 2)
                    byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 1]))
        return bucket

    trainer.tamper = corrupt
    with pytest.raises(WeightSyncError, match=f"checksum differs for {VICTIM}"):
        sync.publish()


def test_the_probe_catches_a_tensor_that_checksums_and_names_cannot_see(
    sync: WeightSync, trainer: HfTrainer, control: VllmEngine
) -> None:
    trainer.perturb(5)

    def stale(stream: Iterator[Named]) -> Iterator[Named]:
        # Sent under its name with a checksum that fits: only not the tensor the trainer computes with.
        return ((name, tensor * 0.9 if name == VICTIM else tensor) for name, tensor in stream)

    trainer.edit = stale
    with pytest.raises(WeightSyncError, match="the probe of version 1 failed"):
        sync.publish()
    assert sync.version == 0
    with pytest.raises(WeightSyncError, match="may not serve"):
        control.resume()


def test_a_bucket_of_another_version_is_refused(sync: WeightSync, trainer: HfTrainer) -> None:
    trainer.tamper = lambda bucket: dataclasses.replace(bucket, version=7)
    with pytest.raises(WeightSyncError, match="is of version 7"):
        sync.publish()


def test_weights_are_refused_while_the_engine_schedules(control: VllmEngine) -> None:
    with pytest.raises(WeightSyncError, match="not paused"):
        control.begin_weights(1, "shm", ["a"])


def test_a_request_frozen_by_a_sync_goes_on_under_the_new_weights(
    sync: WeightSync, trainer: HfTrainer, control: VllmEngine, engine: EngineServer, run_key: str
) -> None:
    sampling = SamplingParams(n=4, max_tokens=400, ignore_eos=True)

    async def run(version: int) -> list[set[int]]:
        again = make_sync(trainer, control)
        request = GenerateRequest(request_id=f"long-{version}", token_ids=tuple(PROMPTS[1]), sampling=sampling)
        trainer.perturb(version)
        client = RouterClient(engine.url, [engine.url], run_key)
        before = control.stats().sampled_tokens
        task = asyncio.create_task(client.generate(request))
        while not task.done() and (await asyncio.to_thread(control.stats)).sampled_tokens == before:
            pass
        await asyncio.to_thread(again.publish, version)
        completions = await task
        await client.aclose()
        again.close()
        assert all(len(c.token_ids) == 400 for c in completions)
        assert all(c.weight_versions[0].start == 0 and c.weight_versions[-1].end == 400 for c in completions)
        for completion in completions:
            last = completion.weight_versions[-1].start
            score = trainer.score([(*PROMPTS[1], *completion.token_ids)])[0][len(PROMPTS[1]) :]
            # After the sync the frozen request's cache was computed again: its log-probs are the new weights'.
            assert np.abs(np.array(completion.log_probs) - score)[last:].max() < 1e-5
        return [{span.version for span in c.weight_versions} for c in completions]

    # Labels no other test leaves behind; several, for the last token may come before the sync does.
    versions = next(v for v in map(asyncio.run, map(run, range(7, 27))) if all(len(spans) == 2 for spans in v))
    assert len(set().union(*versions)) == 2 and max(versions[0]) >= 7


def without(missing: str) -> Callable[[Iterator[Named]], Iterator[Named]]:
    return lambda stream: ((name, tensor) for name, tensor in stream if name != missing)
