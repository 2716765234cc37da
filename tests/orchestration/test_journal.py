"""The journal that a run goes on with."""

from pathlib import Path

import pytest

from vime.config import CheckpointConfig, Config
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.orchestration.journal import with_journal


def go_on(folder: Path, load: str, **changed: str) -> tuple[list[str], str]:
    """Begin again in a folder, then write into the journal's meta. Returns: what was said, and the journal's id."""
    prompts = [Prompt(prompt=f"{i}", tokens=(2 + i,), label=str(i)) for i in range(4)]
    config = Config(checkpoint=CheckpointConfig(save=str(folder / "saves"), load=load))
    buffer = DataBuffer(prompts, n_samples_per_prompt=2, shuffle=False, seed=1)
    source, said = with_journal(config, buffer, None, 0, folder / "run")
    name = source.journal.id
    source.journal.set_meta(**changed)
    source.journal.close()
    return said, name


def test_it_is_the_same_one_however_the_folder_is_spelt(tmp_path: Path) -> None:
    _, first = go_on(tmp_path, f"{tmp_path}/saves")
    assert go_on(tmp_path, f"{tmp_path}/run/../saves/") == ([], first)
    assert not list((tmp_path / "saves").glob("earlier_*"))


@pytest.mark.parametrize("settings", ["{", "[1, 2]", "null", "5"])
def test_settings_that_cannot_be_read_do_not_end_the_run(tmp_path: Path, settings: str) -> None:
    _, first = go_on(tmp_path, f"{tmp_path}/saves", settings=settings)
    assert go_on(tmp_path, f"{tmp_path}/saves") == ([], first)


def test_one_whose_last_event_is_no_number_is_set_aside(tmp_path: Path) -> None:
    _, first = go_on(tmp_path, f"{tmp_path}/saves", event="many")
    (said,), second = go_on(tmp_path, f"{tmp_path}/saves")
    assert "its last event is 'many'; it is called damaged_journal.sqlite now" in said
    assert second != first and (tmp_path / "saves" / "damaged_journal.sqlite").is_file()
