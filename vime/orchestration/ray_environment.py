"""What Ray reads from the environment while it is imported; call before anything imports Ray."""

from __future__ import annotations

import os
import secrets
import sys

from vime.config import ClusterConfig
from vime.errors import ConfigError


def prepare(cluster: ClusterConfig) -> None:
    """Set Ray's variables for a run of this process.

    A cluster that is started here demands a random token of every caller: its servers listen on every interface, which
    Ray cannot change. To join one, its own token settings are left as the user has them.
    Raises: ConfigError if the environment names a cluster that the settings do not.
    """
    if cluster.ray_address is None and (elsewhere := os.environ.get("RAY_ADDRESS")):
        raise ConfigError(
            f"RAY_ADDRESS is {elsewhere} (`ray job submit` sets it), but --ray-address is not given; add --ray-address "
            "auto to run on that cluster, or unset RAY_ADDRESS to start Ray here"
        )
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token" and cluster.ray_address is None:
        raise RuntimeError("Ray was imported before its token authentication could be switched on")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Calls that nobody waits for any more fail when a run is interrupted; their stacks would bury its last line.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Trainers and engines share devices in fractions on purpose; Ray would hide the devices of actors that claim none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if cluster.ray_address is None:
        # Trainers and engines are the work itself; Ray's default of 15 leaves them a thirtieth of a busy core.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
