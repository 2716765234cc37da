"""How `pytest -n LANES` (pytest-xdist) shares the tests out: whole files, those that take longest first.

A file's fixtures are then made once. So is the engine that several files share: they stay in one lane. Files without an
engine or ranks take seconds each, and coming last they fill what is left of the lane that ends first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Files that share a fixture of the session which takes long to make. One that is missing here costs only time.
TOGETHER = {
    "tests/engine/vllm/test_client_real.py": "engine",
    "tests/engine/vllm/test_doors.py": "engine",
    "tests/engine/vllm/test_weight_sync_real.py": "engine",
    "tests/orchestration/test_external.py": "engine",
    "tests/rollout/test_partial_real.py": "engine",
    "tests/engine/vllm/test_fixes.py": "moe_syncs",
    "tests/engine/vllm/test_moe_syncs.py": "moe_syncs",
}

# Files with few tests that take minutes all the same. One that is missing here may leave a lane alone at the end.
LONG = ("tests/chaos/test_rounds.py", "tests/e2e/test_recovery.py", "tests/e2e/test_replay.py", "tests/e2e/test_ppo.py")


def group_of(nodeid: str) -> str:
    """What stays in one lane: the test's file, or the fixture that several files share."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests in place: `LONG` files, then by their group's number of tests with an engine or ranks.

    The order within a group stays.
    """
    many = Counter(group_of(x.nodeid) for x in items if x.get_closest_marker("engine") or x.get_closest_marker("ranks"))
    items.sort(key=lambda x: (group_of(x.nodeid) not in LONG, -many[group_of(x.nodeid)]))


def scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler of pytest-xdist that hands out groups in the order in which the lanes collected them."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # it would put the files with most tests first
    return Groups(config, log)


def share_cores(environment: MutableMapping[str, str], cores: int) -> None:
    """Before torch is imported: what a lane starts computes with its share of the cores and waits without spinning.

    Args:
        environment: the lane's, which its processes inherit; pytest-xdist counts the lanes in it. What is set, stays.
    """
    threads = max(1, cores // int(environment["PYTEST_XDIST_WORKER_COUNT"]))
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # vLLM would bind the engines of all lanes to the same core.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def is_lane(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that pytest-xdist started."""
    return "PYTEST_XDIST_WORKER" in environment
