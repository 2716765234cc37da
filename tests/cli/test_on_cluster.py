"""Settings checked for a cluster that is not here."""

from pathlib import Path

import pytest

from vime.cli.on_cluster import resolve_on
from vime.errors import ConfigError


def test_neither_this_machines_devices_nor_its_data_count(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").unlink()
    words = [*argv, "--platform", "auto", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4"]
    words += ["--rollout-num-gpus-per-engine", "2"]
    config, placement = resolve_on(words, nodes=1, devices_per_node=8)
    assert config.cluster.platform == "cuda"
    assert placement.layout.engine_devices == ((4, 5), (6, 7))
    with pytest.raises(ConfigError, match=r"needs 8 devices .*, but Ray has 10.0.0.1: 6"):
        resolve_on(words, nodes=1, devices_per_node=6)


def test_everything_else_counts(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_on([*argv, "--rollout-top-p", "0.5", "--eps-clip", "2"], nodes=1, devices_per_node=8)
    assert [problem.split()[0] for problem in caught.value.problems] == ["--rollout-top-p", "--eps-clip"]
    with pytest.raises(ConfigError, match="a run on 2 nodes joins a Ray cluster; give --ray-address"):
        resolve_on(argv, nodes=2, devices_per_node=8)
