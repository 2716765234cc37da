import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private import utils

from vime.config import ClusterConfig
from vime.errors import ConfigError, VimeError
from vime.orchestration import ray_environment
from vime.orchestration.cluster import ray_cluster
from vime.orchestration.placement import Layout


def test_a_cluster_that_only_the_environment_names_is_neither_joined_nor_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is set there is gone afterwards
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match="--ray-address auto to run on that cluster, or unset RAY_ADDRESS"):
        ray_environment.prepare(ClusterConfig())
    ray_environment.prepare(ClusterConfig(ray_address="auto"))


def test_a_long_tmpdir_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("TMPDIR", "/long")
    with (
        pytest.raises(ConfigError, match=r"Ray keeps sockets in /long \(TMPDIR\).*set RAY_TMPDIR and TMPDIR"),
        ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "error", "kind", "said"),
    [
        (None, Exception("The current node timed out during startup."), VimeError, "Ray did not start on this machine"),
        (None, ConnectionError("no GCS"), VimeError, "ConnectionError: no GCS"),
        ("auto", ConnectionError("no cluster\nand more"), ConfigError, r"--ray-address auto: .* \(no cluster\)"),
        ("auto", Exception("timed out"), VimeError, r"Ray did not join auto \(Exception: timed out\)"),
    ],
)
def test_a_ray_that_is_not_there_is_an_error_of_vime_that_says_so(
    monkeypatch: pytest.MonkeyPatch, address: str | None, error: Exception, kind: type[VimeError], said: str
) -> None:
    def init(**options: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", init)
    cluster = ClusterConfig(ray_address=address)
    with pytest.raises(VimeError, match=said) as raised, ray_cluster(cluster, Layout(1, (0,), (), False)):
        pass
    assert type(raised.value) is kind and raised.value.__cause__ is error


def test_a_signal_while_ray_starts_ends_the_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as Ray's own does
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the programs have it
    try:
        with pytest.raises(KeyboardInterrupt), ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_signal_in_the_middle_of_rays_own_start_does_so_too() -> None:
    program = """
import os, signal
from vime.config import ClusterConfig
from vime.orchestration import ray_environment
ray_environment.prepare(ClusterConfig())
import ray
from vime.orchestration.cluster import ray_cluster
from vime.orchestration.placement import Layout
signal.signal(signal.SIGTERM, signal.default_int_handler)
connect = ray._private.worker.connect
def interrupted(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return connect(*arguments, **options)
ray._private.worker.connect = interrupted
try:
    with ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)):
        print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


@pytest.mark.ranks
def test_workers_have_the_priority_and_the_modules_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "of_the_driver.py").write_text("VALUE = 7\n")
    program = f"""
import os, sys
from vime.config import ClusterConfig
from vime.orchestration import ray_environment
ray_environment.prepare(ClusterConfig())
import ray
from vime.orchestration.cluster import ray_cluster
from vime.orchestration.placement import Layout
sys.path.append({str(tmp_path)!r})
before = os.environ.get("PYTHONPATH")
with ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)):
    assert os.environ.get("PYTHONPATH") == before
    print("niceness", ray.get(ray.remote(lambda: os.nice(0)).remote()))
    print("module", ray.get(ray.remote(lambda: __import__("of_the_driver").VALUE).remote()))
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"niceness {os.nice(0)}\nmodule 7\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.ranks
@pytest.mark.slow  # who is refused tries again for 25 s
def test_ray_lets_nobody_in_without_its_token() -> None:
    program = """
import os, subprocess, sys
from vime.config import ClusterConfig
from vime.orchestration import ray_environment
ray_environment.prepare(ClusterConfig())
import ray
from vime.orchestration.cluster import ray_cluster
from vime.orchestration.placement import Layout
JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('let in')"
token = {"RAY_AUTH_MODE": "token"}
callers = {
    "without": {},
    "wrong": {**token, "RAY_AUTH_TOKEN": "0" * 64},
    "right": {**token, "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]},
}
with ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)):
    address = ray.get_runtime_context().gcs_address
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | {"HOME": "/nonexistent"}
    joins = {
        name: subprocess.Popen(
            [sys.executable, "-c", JOIN, address], env=plain | more, stdout=subprocess.PIPE, text=True
        )
        for name, more in callers.items()
    }
    for name, join in joins.items():
        print(name, "let in" in join.communicate()[0], join.returncode == 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(("without", "wrong", "right"))]
    assert said == ["without False False", "wrong False False", "right True True"], done.stdout + done.stderr
