"""The contract of --custom-update-weight-post-write-path: called with each file of the disk transport."""

from pathlib import Path

import pytest
import torch

from tests.weight_sync import ends
from vime.config import Config, LogConfig, SyncConfig
from vime.errors import HookError
from vime.protocols import TrainerContext
from vime.weight_sync import Route, make_writer
from vime.wire import BucketMessage


def copy_to_node(config: TrainerContext, path: Path, version: int) -> None:
    """Pretend that another node's disk is beside."""
    target = Path(config.config.log.run_dir) / f"copy-{version}"
    target.write_bytes(path.read_bytes())


def says_done(config: TrainerContext, path: Path, version: int) -> str:
    return "done"


def write(tmp_path: Path, name: str) -> BucketMessage:
    hook = f"tests.weight_sync.test_post_write.{name}"
    config = Config(
        sync=SyncConfig(
            update_weight_transport="disk",
            update_weight_disk_dir=str(tmp_path / "sync"),
            custom_update_weight_post_write_path=hook,
        ),
        log=LogConfig(run_dir=str(tmp_path)),
    )
    writer = make_writer(Route(transport="disk", host="127.0.0.1", num_readers=1), config)
    try:
        return ends.write(writer, [("a", torch.arange(4.0))], 3, 0)
    finally:
        writer.close()


def test_it_sees_each_finished_file(tmp_path: Path) -> None:
    message = write(tmp_path, "copy_to_node")
    assert (tmp_path / "copy-3").stat().st_size == message.num_bytes


def test_what_it_returns_is_checked(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"says_done returned done \(str\), but None is expected \(defined in"):
        write(tmp_path, "says_done")
