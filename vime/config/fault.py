"""Settings of what is survived: engines and the router that end or hang (docs/failures.md)."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.schema import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """How engines and router are watched, and how often they may be started again."""

    use_fault_tolerance: bool = setting(
        True, "an engine or router that ends or hangs is started again, with the current weights; off: it ends the run"
    )
    rollout_health_check_interval: float = setting(5.0, "seconds between two looks at an engine, or the router")
    rollout_health_check_timeout: float = setting(
        120.0, "seconds an engine may stay mute, outside weight syncs, until it is ended and started again"
    )
    rollout_health_check_first_wait: float = setting(
        0.0, "seconds after an engine's start in which being mute does not count"
    )
    rollout_router_memory_limit_bytes: int = setting(
        4 * 2**30,
        "a router that takes more is started again; its requests are sent again; 0: no limit, as with --deterministic",
    )
    rollout_max_restarts: int = setting(
        5, "restarts of one engine, or of the router, in --rollout-restart-window-s; the next failure ends the run"
    )
    rollout_restart_window_s: float = setting(1800.0, "seconds that a restart counts")
    rollout_restart_backoff_s: float = setting(
        1.0, "seconds before the second restart in that window; doubled for each further one, up to 60"
    )
