"""Notices when a server process that serves stops doing so: it ends, is stopped, closes its port, or is mute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from vime.engine.vllm.processes import local_client

_LOOK_S = 0.5  # between two looks at the process itself, which cost nothing
_ANSWER_S = 5.0  # of one GET; a mute server is asked again until it was mute for too long
_STOPPED_S = 10.0  # a debugger may stop a process for a moment


def until_failure(
    *,
    pid: int,
    url: str,
    path: str,
    key: str,
    has_ended: Callable[[], str | None],
    interval_s: float,
    timeout_s: float,
    first_wait_s: float = 0.0,
) -> str:
    """Block until something is wrong with a server that has served.

    Args:
        pid: of the server, which leads a process group of its own.
        url, path: what is asked for by GET.
        key: the run's key.
        has_ended: the cause in words once the process is gone.
        interval_s: between two requests.
        timeout_s: so long it may be mute.
        first_wait_s: being mute does not count until then, from now.
    Returns: what is wrong, in words.
    """
    last_answer = time.monotonic() + first_wait_s
    stopped_since: float | None = None
    next_request = 0.0
    members: list[int] = []
    with local_client(key) as http:
        while True:
            if (words := has_ended()) is not None:
                return words
            now = time.monotonic()
            if now >= next_request:
                members = group_members(pid)  # a look at every process of the machine
            if stopped := stopped_members(pid, members):
                stopped_since = stopped_since or now
                if now - stopped_since >= _STOPPED_S:
                    return f"process {stopped[0]} of it has been stopped (SIGSTOP) for {now - stopped_since:.0f} s"
            else:
                stopped_since = None
            if now >= next_request and not stopped:
                next_request = now + interval_s
                try:
                    status = http.get(url + path, timeout=min(_ANSWER_S, timeout_s)).status_code
                    if status == 503:
                        return "its server says that its engine is dead (GET /health: 503)"
                    last_answer = max(last_answer, time.monotonic())
                except httpx.ConnectError:
                    if (words := has_ended()) is None:
                        return "it closed its port: its engine core died"
                    return words
                except httpx.TransportError:
                    pass  # mute, or it ended in this moment
                if (mute := time.monotonic() - last_answer) >= timeout_s:
                    return f"it has not answered for {mute:.0f} s (--rollout-health-check-timeout)"
            time.sleep(_LOOK_S)


def group_members(group: int) -> list[int]:
    """Processes of a process group; none where there is no /proc."""
    pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _state_and_group(pid)[1] == group]


def stopped_members(group: int, pids: Sequence[int]) -> list[int]:
    """Those of these processes that a signal has stopped, while they are of the group."""
    return [pid for pid in pids if _state_and_group(pid) == ("T", group)]


def _state_and_group(pid: int) -> tuple[str, int]:
    """Of a process; of none, ("", -1)."""
    try:
        # The name, in parentheses, may hold spaces and parentheses itself.
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return "", -1  # it ended in this moment
    return state, int(group)
