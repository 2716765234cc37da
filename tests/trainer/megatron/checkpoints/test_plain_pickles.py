"""What is in a checkpoint is read, not run."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vime.errors import ConfigError
from vime.trainer.megatron.checkpoints import plain_pickles
from vime.trainer.megatron.checkpoints.stored_tensors import StoredTensors


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mknod, (self.path,)


def save(folder, **state):
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def test_tensors_random_states_and_plain_objects_pass(tmp_path):
    state = {"torch": torch.get_rng_state(), "steps": 3, "names": ["a", None]}
    save(tmp_path, weight=torch.ones(2, 3, dtype=torch.bfloat16), random=state)
    plain_pickles.check(tmp_path)
    assert StoredTensors(tmp_path).keys() == {"weight", "random.torch"}


def test_an_object_that_names_code_is_refused_unread(tmp_path):
    save(tmp_path / "ck", weight=torch.ones(2), extra=Touches(tmp_path / "ran"))
    with pytest.raises(pickle.UnpicklingError, match="mknod"):
        plain_pickles.check(tmp_path / "ck")
    assert not (tmp_path / "ran").exists()
    dcp.load({"extra": None}, checkpoint_id=str(tmp_path / "ck"), no_dist=True)
    assert (tmp_path / "ran").exists(), "torch would not run it any more: vime need not look"


@pytest.mark.parametrize("trick", ["alone", "inside"])
def test_an_index_that_names_code_is_refused_unread(tmp_path, trick):
    folder = tmp_path / "ck"
    save(folder, weight=torch.ones(2))
    index = Touches(tmp_path / "ran")
    if trick == "inside":
        index = plain_pickles.read_metadata(folder)
        index.planner_data = Touches(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        plain_pickles.check(folder)
    with pytest.raises(ConfigError, match="not a training checkpoint, or is damaged"):
        StoredTensors(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["os.system", "builtins.eval", "torch.load", "torch._C", "torch.serialization.os"])
def test_names_beside_the_records_are_refused(path):
    module, _, name = path.rpartition(".")
    with pytest.raises(pickle.UnpicklingError):
        plain_pickles._Records(Path(os.devnull).open("rb")).find_class(module, name)
