"""What is said of --offload and its halves."""

from __future__ import annotations

from typing import Any

import pytest

from vime.config import ClusterConfig, Config, DebugConfig
from vime.config.validate_sharing import check_sharing


def problems(*, turns_problem: str | None = None, **cluster: Any) -> list[str]:
    config = Config(cluster=ClusterConfig(**{"colocate": True, **cluster}))
    return list(check_sharing(config, platform="cuda", turns_problem=turns_problem))


@pytest.mark.parametrize(
    "cluster",
    [
        {},
        {"offload": True},
        {"offload": False},
        {"offload_train": True},
        {"offload_rollout": True, "offload_train": False},
        {"offload": False, "offload_rollout": True},
    ],
)
def test_settings_that_go_together(cluster: dict[str, bool]) -> None:
    assert problems(**cluster) == []


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ({"offload_train": True, "offload_rollout": False}, "--offload-train, --no-offload-rollout: a trainer that"),
        ({"offload": True, "offload_rollout": False}, "--offload, --no-offload-rollout: a trainer that leaves frees"),
        ({"colocate": False, "offload": True}, "--offload: without --colocate trainer and engines have devices of"),
        (
            {"offload": True, "turns_problem": "it has no memory"},
            "--offload: the cuda platform cannot do it: it has no",
        ),
    ],
)
def test_contradictions_are_named(cluster: dict[str, Any], sentence: str) -> None:
    (problem,) = problems(**cluster)
    assert problem.startswith(sentence)


def test_a_platform_that_moves_nothing_may_be_told_so() -> None:
    assert problems(offload_train=False, turns_problem="it has no memory") == []


def test_a_run_without_engines_shares_nothing() -> None:
    config = Config(
        cluster=ClusterConfig(colocate=True, offload=True), debug=DebugConfig(load_debug_rollout_data="somewhere")
    )
    (problem,) = check_sharing(config, platform="cuda", turns_problem=None)
    assert problem.startswith("--offload: this run starts no engines to share devices with")
