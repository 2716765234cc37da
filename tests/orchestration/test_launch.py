"""What a run decides before it starts anything."""

from pathlib import Path

import pytest

from vime.config import CheckpointConfig, Config
from vime.errors import ConfigError
from vime.orchestration.launch import _checkpoint_to_resume


def test_a_folder_without_a_checkpoint_is_refused_unless_this_run_will_fill_it(tmp_path: Path) -> None:
    load = str(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint there"):
        _checkpoint_to_resume(Config(checkpoint=CheckpointConfig(load=load, save=f"{load}/other")))
    same = Config(checkpoint=CheckpointConfig(load=load, save=load))
    assert _checkpoint_to_resume(same) is None
    (tmp_path / "rollout_000004").mkdir()
    (tmp_path / "rollout_000004" / "state.json").write_text("{}")
    assert _checkpoint_to_resume(same) == tmp_path
    assert _checkpoint_to_resume(Config()) is None
