"""Two Ray nodes on this machine, with addresses, resources and ports of their own, behind a token."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from vime.engine.vllm.processes import free_port, stop_process

# All of 127.0.0.0/8 is this machine. Not 127.0.0.1: Ray takes it to mean the machine's outward address.
_HEAD, _SECOND = "127.0.0.2", "127.0.0.3"
_RAYS_OWN_PORTS = 20_000  # below it are the ports that Ray gives its workers


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    address: str
    environment: dict[str, str]
    """What a driver needs in its environment."""
    second: psutil.Process
    """`ray start` of the second node; all of the node's processes are its children."""

    def signal_second(self, number: int) -> None:
        """To all processes of the second node at once."""
        node = [self.second, *self.second.children(recursive=True)]
        for process in node:
            process.suspend()  # none sees another's end
        for process in node if number != signal.SIGSTOP else []:
            process.send_signal(number)


@contextmanager
def two_ray_nodes(
    folder: Path, *, num_cpus: tuple[int, int] = (1, 1), variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Cluster]:
    """Started with `ray start`, as docs/multi_node.md has it; ended with the context.

    Args: variables: further ones of the environment.
    """
    environment = {
        **os.environ,
        **variables,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else workers, engines and ranks wait for everybody on a busy machine
    }
    port = next(p for p in iter(lambda: free_port(_HEAD), None) if p > _RAYS_OWN_PORTS)
    address = f"{_HEAD}:{port}"
    common = ["--object-store-memory", "200000000", "--disable-usage-stats", "--block"]
    head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(folder)]
    commands = [
        [*head, "--node-ip-address", _HEAD, "--num-cpus", str(num_cpus[0]), *common],
        ["--address", address, "--node-ip-address", _SECOND, "--num-cpus", str(num_cpus[1]), *common],
    ]
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"node_{number}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(stop_process, process, 20.0)
            _wait_for_nodes(process, address, environment, number + 1, folder)
        cluster = Cluster(address, environment, psutil.Process(process.pid))
        stack.callback(_kill_all, cluster.second)  # of a node that a test has stopped
        yield cluster


def _kill_all(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() == psutil.STATUS_STOPPED:
            for each in [*process.children(recursive=True), process]:
                each.kill()


def _wait_for_nodes(
    process: subprocess.Popen[bytes], address: str, environment: dict[str, str], count: int, folder: Path
) -> None:
    """Ask Ray from a process of its own: one process cannot join two clusters, or one with a token and one without."""
    program = (
        "import sys, time, ray\n"
        "ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
        "end = time.monotonic() + 300\n"
        "while sum(n['Alive'] for n in ray.nodes()) < int(sys.argv[2]):\n"
        "    assert time.monotonic() < end, 'a node is missing'\n"
        "    time.sleep(0.3)\n"
    )
    deadline = time.monotonic() + 900
    while "Ray runtime started" not in (folder / f"node_{count - 1}.log").read_text(errors="replace"):
        assert process.poll() is None, (folder / f"node_{count - 1}.log").read_text(errors="replace")
        assert time.monotonic() < deadline
        time.sleep(0.3)
    while True:
        done = subprocess.run(
            [sys.executable, "-c", program, address, str(count)], env=environment, capture_output=True, text=True
        )
        if done.returncode == 0:
            return
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("node_*.log"))
        assert process.poll() is None, logs
        assert time.monotonic() < deadline, f"{done.stderr[-2000:]}\n{logs}"
        time.sleep(1)
