import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints import save_checkpoint
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.errors import ConfigError, DataError, TrainingError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import (
    find_checkpoints,
    load_checkpoint,
    load_weights,
    open_checkpoint,
    set_aside,
    weights_of,
)
from vime.loop.checkpoint_writing import CheckpointWriting, write_weights_file
from vime.loop.replay import NoPrompts

SETTINGS = {"fixed": {"--optimizer": "adam"}}


class FakeTrainer:
    def __init__(self, fail: bool = False) -> None:
        self.fail, self.loaded = fail, ""

    def save(self, path: Path) -> None:
        path.mkdir()
        (path / "weights").write_text("w")
        if self.fail:
            raise OSError(28, "No space left on device")

    def load(self, path: Path) -> None:
        self.loaded = (path / "weights").read_text()


class FakeSource:
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def state(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def restore(self, state: dict[str, Any]) -> None:
        self.offset = state["offset"]


def save(folder: Path, rollout_id: int, trainer: Any = None, source: Any = None, stop: StopRule | None = None) -> Path:
    return save_checkpoint(
        folder, rollout_id, trainer or FakeTrainer(), source or FakeSource(), stop or StopRule(), SETTINGS
    )


def test_the_newest_checkpoint_restores_trainer_data_and_stop_rule(tmp_path: Path) -> None:
    for rollout_id in (1, 12):
        stop = StopRule("train/loss", below=0.0, window=3)
        for value in (1.0, float(rollout_id)):
            stop.reached({"train/loss": value})
        save(tmp_path, rollout_id, source=FakeSource(rollout_id * 8), stop=stop)
    trainer, source, stop = FakeTrainer(), FakeSource(), StopRule("train/loss", below=0.0, window=3)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.rollout_id, checkpoint.settings) == (12, SETTINGS)
    load_checkpoint(checkpoint, trainer, source, stop)
    assert (source.offset, trainer.loaded, stop.state()["values"]) == (96, "w", [1.0, 12.0])


def test_a_certain_checkpoint_can_be_chosen(tmp_path: Path) -> None:
    for rollout_id in (1, 5, 12):
        save(tmp_path, rollout_id)
    assert open_checkpoint(tmp_path, 5).rollout_id == 5
    with pytest.raises(ConfigError, match=r"--ckpt-step is 6, but .* checkpoints of rollouts 1, 5, 12"):
        open_checkpoint(tmp_path, 6)


def test_the_weights_can_be_taken_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, source=FakeSource(8))
    trainer = FakeTrainer()
    load_weights(open_checkpoint(tmp_path), trainer)  # type: ignore[arg-type]
    assert trainer.loaded == "w"


def test_a_full_disk_leaves_the_older_checkpoint_and_no_partial_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, FakeTrainer(fail=True))
    assert [p.name for p in tmp_path.iterdir()] == ["rollout_000001"]


def test_a_writer_that_does_not_say_that_the_disk_is_full_is_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trainer(FakeTrainer):
        def save(self, path: Path) -> None:
            raise TrainingError("unexpected pos 704 vs 598")

    with pytest.raises(TrainingError):
        save(tmp_path, 2, Trainer())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="checkpoint of rollout 2: the disk is full"):
        save(tmp_path, 2, Trainer())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    class Trainer(FakeTrainer):
        def load(self, path: Path) -> None:
            raise TrainingError("training rank 0 failed")

    path = save(tmp_path, 1)
    with pytest.raises(TrainingError, match=r"rollout_000001 cannot be loaded; if damaged, move it away .*--ckpt-step"):
        load_checkpoint(open_checkpoint(tmp_path), Trainer(), FakeSource(), StopRule())
    for text in ('{"format": ', "[]", '{"format": 2, "rollout_id": 1}', '{"format": 2, "rollout_id": "1"}'):
        (path / "state.json").write_text(text)
        with pytest.raises(ConfigError, match=r"rollout_000001 is damaged: .*state.json.*; move it away"):
            open_checkpoint(tmp_path)


def test_a_damaged_stop_rule_is_named(tmp_path: Path) -> None:
    state = json.loads((save(tmp_path, 1) / "state.json").read_text())
    del state["seal"]  # as checkpoints of older versions have none
    (tmp_path / "rollout_000001" / "state.json").write_text(json.dumps(state | {"stop": {}}))
    with pytest.raises(DataError, match=r"in state\.json the stop rule is damaged"):
        load_checkpoint(open_checkpoint(tmp_path), FakeTrainer(), FakeSource(), StopRule())


@pytest.mark.parametrize("file", ["state.json", "trainer/weights"])
def test_a_damaged_newest_one_is_passed_over_for_the_one_before_it(tmp_path: Path, file: str) -> None:
    for rollout_id in (1, 5, 12, 13):
        save(tmp_path, rollout_id)
    path = tmp_path / "rollout_000012"
    (path / file).write_text("")
    (tmp_path / "rollout_000013" / "trainer" / "weights").unlink()
    checkpoint = open_checkpoint(tmp_path)
    damages = [(p.name, damage) for p, damage in checkpoint.skipped]
    assert checkpoint.rollout_id == 5 and damages[0] == ("rollout_000013", "trainer/weights is missing")
    assert damages[1][0] == path.name and ("state.json" in damages[1][1] or "0 of 1 bytes" in damages[1][1])
    with pytest.raises(ConfigError, match=r"rollout_000012 is damaged: .*; move it away"):
        open_checkpoint(tmp_path, 12)  # chosen by name, it is not exchanged for another
    assert [p.name for p in set_aside(checkpoint)] == ["damaged_rollout_000013", "damaged_rollout_000012"]
    assert open_checkpoint(tmp_path).skipped == []
    save(tmp_path, 12)
    (path / file).write_text("")
    assert [p.name for p in set_aside(open_checkpoint(tmp_path))] == ["damaged_rollout_000012_1"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "give it as --hf-checkpoint"),
        ("latest_checkpointed_iteration.txt", "Megatron-LM's own"),
        ("state.json", "it is one checkpoint: give --load .* and --ckpt-step"),
    ],
)
def test_other_folders_are_named_for_what_they_are(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(tmp_path)


def test_weights_alone_are_a_checkpoint_of_no_rollout(tmp_path: Path) -> None:
    FakeTrainer().save(tmp_path / "trainer")
    write_weights_file(tmp_path, SETTINGS)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.is_weights_alone, checkpoint.settings) == (True, SETTINGS)
    assert weights_of(tmp_path, None) == (tmp_path / "trainer", SETTINGS)
    with pytest.raises(ConfigError, match=r"--ckpt-step is 3, but .* holds weights alone"):
        open_checkpoint(tmp_path, 3)
    (tmp_path / "trainer" / "weights").write_text("")
    with pytest.raises(ConfigError, match=r"is damaged: trainer/weights has 0 of 1 bytes; convert it again"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"weights.json is damaged"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / "rollout_000007")
    with pytest.raises(ConfigError, match=r"rollout_000007 is the checkpoint of rollout 1 .* call it rollout_000001"):
        open_checkpoint(tmp_path)


def test_the_data_is_compared_before_the_trainer_loads(tmp_path: Path) -> None:
    class OtherData(FakeSource):
        def restore(self, state: dict[str, Any]) -> None:
            raise DataError("the prompts differ")

    save(tmp_path, 1)
    trainer = FakeTrainer()
    with pytest.raises(DataError, match="the prompts differ"):
        load_checkpoint(open_checkpoint(tmp_path), trainer, OtherData(), StopRule())  # type: ignore[arg-type]
    assert trainer.loaded == ""


def buffer(*texts: str) -> DataBuffer:
    prompts = [Prompt(prompt=text, tokens=(i,)) for i, text in enumerate(texts)]
    return DataBuffer(prompts, n_samples_per_prompt=2, shuffle=True, seed=3)


def test_the_next_prompts_are_those_of_a_run_that_never_stopped_and_other_data_is_refused(tmp_path: Path) -> None:
    straight = buffer(*"abcdefg")
    straight.get_groups(3)
    straight.put_back(straight.get_groups(2)[1:])
    save(tmp_path, 1, source=straight)
    resumed = buffer(*"abcdefg")
    load_checkpoint(open_checkpoint(tmp_path), FakeTrainer(), resumed, StopRule())  # type: ignore[arg-type]
    assert resumed.get_groups(9) == straight.get_groups(9)
    with pytest.raises(DataError, match="the saved data buffer does not belong to this run"):
        load_checkpoint(open_checkpoint(tmp_path), FakeTrainer(), buffer(*"abcdefx"), StopRule())  # type: ignore[arg-type]


def test_a_replay_goes_on_from_any_checkpoint_but_only_a_replay_from_a_replays(tmp_path: Path) -> None:
    save(tmp_path / "real", 1)
    save(tmp_path / "replay", 1, source=NoPrompts())
    for folder in ("real", "replay"):
        checkpoint = open_checkpoint(tmp_path / folder)
        load_checkpoint(checkpoint, FakeTrainer(), NoPrompts(), StopRule())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"read no prompts.*--finetune"):
        load_checkpoint(open_checkpoint(tmp_path / "replay"), FakeTrainer(), FakeSource(), StopRule())


def test_a_folder_without_state_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "rollout_000009" / "trainer").mkdir(parents=True)
    assert find_checkpoints(tmp_path) == []
    assert find_checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(ConfigError, match="no checkpoint there"):
        open_checkpoint(tmp_path)


def test_the_same_rollout_saved_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, source=FakeSource(1))
    path = save(tmp_path, 3, source=FakeSource(2))
    assert json.loads((path / "state.json").read_text())["data_source"] == {"offset": 2}


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 0)
    (path / "state.json").write_text(json.dumps({"format": 99, "rollout_id": 0, "data_source": {}}))
    with pytest.raises(ConfigError, match="format 99"):
        open_checkpoint(tmp_path)


def flip(path: Path, at: int) -> None:
    """Change one bit; size and name stay."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("trainer/weights", r"trainer/weights is not what was written: its checksum is \w{8}, it was \w{8}"),
        ("state.json", r"state.json (is not what was written|cannot be read)"),
    ],
)
def test_a_flipped_bit_in_the_newest_one_is_found_and_the_one_before_is_used(
    tmp_path: Path, file: str, words: str
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 5) / file
    flip(path, path.read_bytes().index(b'"values"') + 3 if file == "state.json" else 0)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.rollout_id == 1
    ((passed_over, damage),) = checkpoint.skipped
    assert passed_over.name == "rollout_000005" and re.search(words, damage)


def test_without_checksums_sizes_alone_are_compared(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer()
    writing = CheckpointWriting(tmp_path, 1, trainer, {}, StopRule(), SETTINGS, in_background=False, checksums=False)
    path = writing.complete(wait=True)
    assert path is not None
    flip(path / "trainer" / "weights", 0)
    assert open_checkpoint(tmp_path).rollout_id == 1
    (path / "trainer" / "weights").write_text("")
    with pytest.raises(ConfigError, match="0 of 1 bytes"):
        open_checkpoint(tmp_path)


_FILLS = """
import resource, sys
from pathlib import Path
from tests.loop.test_checkpoint import FakeSource, SETTINGS
from vime.loop.cadence import StopRule
from vime.loop.checkpoint_writing import CheckpointWriting

class Trainer:
    def save(self, path):
        path.mkdir()
        (path / "weights").write_bytes(bytes(100_000))

resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
try:
    CheckpointWriting(Path(sys.argv[1]), 7, Trainer(), {}, StopRule(), SETTINGS, in_background=False)
except OSError as error:
    print(error)
"""


def test_files_that_cannot_grow_end_the_save_and_leave_the_checkpoint_before_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    command = [sys.executable, "-c", _FILLS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "File too large" in ended.stdout, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_000001"]
    assert open_checkpoint(tmp_path).skipped == []
