"""Lanes of the tests: what stays together, what comes first, and a run in two of them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import lanes

ROOT = Path(__file__).resolve().parents[1]


def item(nodeid, *marks):
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name if name in marks else None)


def test_long_files_and_those_with_most_engines_and_ranks_come_first_and_keep_their_order():
    items = [
        item("tests/a.py::test_1"),
        item("tests/a.py::test_2"),
        item("tests/b.py::test_1", "engine"),
        item("tests/c.py::test_2", "ranks"),
        item("tests/c.py::test_1", "engine"),
        item("tests/c.py::test_0"),
        item(f"{lanes.LONG[0]}::test_1", "ranks"),
    ]
    lanes.longest_first(items)
    assert items[0].nodeid.startswith(lanes.LONG[0])
    assert [x.nodeid.removeprefix("tests/") for x in items[1:]] == [
        *("c.py::test_2", "c.py::test_1", "c.py::test_0"),
        *("b.py::test_1", "a.py::test_1", "a.py::test_2"),
    ]


def test_files_that_share_an_engine_are_one_group_and_others_their_own():
    assert lanes.group_of("tests/engine/vllm/test_doors.py::test_x[a::b]") == "engine"
    assert lanes.group_of("tests/rollout/test_partial_real.py::test_y") == "engine"
    assert lanes.group_of("tests/algo/test_kl.py::test_z[a::b]") == "tests/algo/test_kl.py"


def test_every_file_that_is_named_is_there(pytestconfig):
    assert [x for x in [*lanes.TOGETHER, *lanes.LONG] if not (pytestconfig.rootpath / x).is_file()] == []


def test_a_lane_has_its_share_of_the_cores_and_what_the_user_set_stays():
    environment = {"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "2", "OMP_WAIT_POLICY": "active"}
    assert lanes.is_lane(environment)
    lanes.share_cores(environment, 8)
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["OMP_WAIT_POLICY"] == "active"
    lanes.share_cores(other := {"PYTEST_XDIST_WORKER_COUNT": "4"}, 2)
    assert other["OMP_NUM_THREADS"] == "1"


def test_two_lanes_run_each_file_once_in_one_lane_and_a_failure_fails_the_run(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        "import os, pytest\nfrom tests import lanes\nfrom tests.conftest import pytest_xdist_make_scheduler\n"
        "@pytest.fixture(autouse=True)\n"
        "def seen(request):\n"
        "    with open(f'{request.path}.lanes', 'a') as out:\n"
        "        print(os.environ['PYTEST_XDIST_WORKER'], request.node.name, file=out)\n"
    )
    for name in "abcd":
        wrong = "def test_wrong(): assert False\n" if name == "b" else ""
        (tmp_path / f"test_{name}.py").write_text(f"def test_1(): pass\ndef test_2(): pass\n{wrong}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--durations=1", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 8 passed" in done.stdout and "FAILED test_b.py::test_wrong" in done.stdout
    found = {name: (tmp_path / f"test_{name}.py.lanes").read_text().split() for name in "abcd"}
    assert {name: seen[1::2] for name, seen in found.items()} == {
        name: ["test_1", "test_2", *(["test_wrong"] if name == "b" else [])] for name in "abcd"
    }
    assert [len(set(seen[::2])) for seen in found.values()] == [1, 1, 1, 1]
    assert len({lane for seen in found.values() for lane in seen[::2]}) == 2
