"""Which saved weights belong to which rollout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vime.agreement.run_files import RunFiles, pairs_of
from vime.agreement.tokens import select
from vime.config import CheckpointConfig, Config, LogConfig
from vime.errors import ConfigError, DataError
from vime.observability.run_folder import RunFolder
from vime.types import Group, Sample, VersionSpan


def sample(i: int, *spans: tuple[int, int, int], mask: tuple[int, ...] = (1, 1, 1, 1)) -> Sample:
    return Sample(
        tokens=(5, 6, 7, 8, 9, 10),
        response_length=4,
        loss_mask=mask,
        rollout_log_probs=(-1.0, -2.0, -3.0, -4.0),
        weight_versions=tuple(VersionSpan(*span) for span in spans),
        group_id=i,
        sample_id=i,
        trajectory_id=i,
    )


def write_run(folder: Path, versions: dict[int, list[Sample]], config: Config) -> RunFiles:
    run = RunFolder(folder)
    run.write_config({"program": "train.py", "settings": config})
    for rollout_id, samples in versions.items():
        run.write_rollout(rollout_id, [Group(s.group_id, [s]) for s in samples])
    return RunFiles(folder)


def saves(folder: Path, **more: object) -> Config:
    checkpoint = CheckpointConfig(
        hf_checkpoint="model", save_hf=str(folder / "hf" / "{rollout_id}"), save=str(folder / "checkpoints")
    )
    return Config(checkpoint=replace(checkpoint, **more), log=LogConfig(run_dir=str(folder)))


def export(folder: Path, *rollout_ids: int) -> None:
    for rollout_id in rollout_ids:
        (folder / "hf" / str(rollout_id)).mkdir(parents=True)
        (folder / "hf" / str(rollout_id) / "config.json").write_text("{}")


def synchronous(num: int) -> dict[int, list[Sample]]:
    """Rollout r is sampled by version r + 1: 1 is what the run started from."""
    return {r: [sample(0, (r + 1, 0, 4)), sample(1, (r + 1, 0, 4))] for r in range(num)}


def test_weights_exported_after_a_rollout_belong_to_the_next_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, synchronous(6), saves(tmp_path))
    export(tmp_path, 1, 3, 5)
    pairs, unused = pairs_of(run.rollouts(), run.weights(tmp_path / "model"), None)
    assert [(p.step, p.weights.version, p.weights.path.name) for p in pairs] == [
        (0, 1, "model"),
        (2, 3, "1"),
        (4, 5, "3"),
    ]
    assert unused == ["HF export after rollout 5 (version 7): it sampled no kept rollout"]


def test_training_checkpoints_are_weights_too_and_exports_win(tmp_path: Path) -> None:
    run = write_run(tmp_path, synchronous(4), saves(tmp_path))
    export(tmp_path, 1)
    for rollout_id in (1, 2):
        (path := tmp_path / "checkpoints" / f"rollout_{rollout_id:06d}").mkdir(parents=True)
        (path / "state.json").write_text("{}")
    weights = run.weights(None)
    assert {v: (w.is_hf, w.path.name) for v, w in weights.items()} == {3: (True, "1"), 4: (False, "rollout_000002")}


def test_with_rollouts_one_ahead_the_versions_on_the_tokens_count(tmp_path: Path) -> None:
    ahead = {
        r: [sample(0, (max(r, 1), 0, 4))] for r in range(5)
    }  # rollout r by version r: one older than the trainer's
    run = write_run(tmp_path, ahead, saves(tmp_path))
    export(tmp_path, 1)
    pairs, _ = pairs_of(run.rollouts(), run.weights(None), None)
    assert [(p.step, p.weights.version) for p in pairs] == [(3, 3)]


def test_a_rollout_whose_weights_were_not_saved_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, synchronous(4), saves(tmp_path))
    export(tmp_path, 1)
    weights = run.weights(None)
    assert [p.step for p in pairs_of(run.rollouts(), weights, [2])[0]] == [2]
    with pytest.raises(ConfigError, match="version 4 sampled rollout 3, and weights are saved of 3") as error:
        pairs_of(run.rollouts(), weights, [3, 9])
    assert "--step 9: rollout 9 was not kept; there are 0, 1, 2, 3" in str(error.value)


def test_samples_without_versions_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, {0: [sample(0)]}, saves(tmp_path))
    export(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"sampled any of the kept rollouts \(versions unknown\)"):
        pairs_of(run.rollouts(), run.weights(None), None)
    with pytest.raises(ConfigError, match="nothing says which version"):
        pairs_of(run.rollouts(), run.weights(None), [0])


def test_a_rollout_that_cannot_be_read_is_named_and_leaves_the_others(tmp_path: Path) -> None:
    run = write_run(tmp_path, synchronous(2), saves(tmp_path))
    export(tmp_path, 0)
    path = run.rollouts()[0]
    path.write_bytes(path.read_bytes()[:200])
    weights = run.weights(tmp_path / "model")
    pairs, notes = pairs_of(run.rollouts(), weights, None)
    assert [pair.step for pair in pairs] == [1]
    assert any(f"{path} cannot be read as a rollout" in note for note in notes)
    with pytest.raises(DataError, match="cannot be read as a rollout"):
        pairs_of(run.rollouts(), weights, [0])
    assert [pair.step for pair in pairs_of(run.rollouts(), weights, [1, 1])[0]] == [1]


def test_a_run_without_exports_says_how_to_have_them(tmp_path: Path) -> None:
    run = write_run(tmp_path, synchronous(2), saves(tmp_path, save_hf=None))
    with pytest.raises(ConfigError, match="--save-hf-interval 20"):
        pairs_of(run.rollouts(), run.weights(None), None)


def test_the_weights_of_a_finetuned_start_are_not_those_of_hf_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path, synchronous(2), saves(tmp_path, load="other", finetune=True))
    assert run.weights(tmp_path / "model") == {}


def test_a_run_folder_that_was_moved_has_its_exports_with_it(tmp_path: Path) -> None:
    write_run(tmp_path / "before", synchronous(3), saves(tmp_path / "before"))
    export(tmp_path / "before", 0)
    (tmp_path / "before").rename(tmp_path / "after")
    weights = RunFiles(tmp_path / "after").weights(None)
    assert weights[2].path == tmp_path / "after" / "hf" / "0"


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml; give the folder named by --run-dir"):
        RunFiles(tmp_path)


def test_only_trainable_tokens_of_the_version_are_compared() -> None:
    mixed = [sample(0, (3, 0, 2), (4, 2, 4), mask=(1, 0, 1, 1)), sample(1, (3, 0, 4)), sample(2, (4, 0, 4))]
    tokens = select(mixed, 3)
    assert [s.sample_id for s in tokens.samples] == [0, 1]
    assert tokens.sample.tolist() == [0, 1, 1, 1, 1]
    assert tokens.place.tolist() == [2, 2, 3, 4, 5] and tokens.position.tolist() == [0, 0, 1, 2, 3]
    assert tokens.engine.tolist() == [-1.0, -1.0, -2.0, -3.0, -4.0]
    assert select(mixed, None, max_samples=2).trajectory.tolist() == [0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(DataError, match="is of version 9"):
        select(mixed, 9)
