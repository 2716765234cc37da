"""What train.py says before it starts anything."""

import os
import signal
import time
from pathlib import Path

import pytest

from vime.cli.launch import _check_machine, main
from vime.config import ClusterConfig
from vime.errors import ConfigError
from vime.loop.folder_lock import only_run_in
from vime.observability.run_folder import RunFolder
from vime.platform.cpu import CpuPlatform


def test_what_the_machine_lacks_is_named_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "missing", lambda self: ["lscpu was not found", "too little memory"])
    with pytest.raises(ConfigError) as caught:
        _check_machine(ClusterConfig(platform="cpu"))
    assert caught.value.problems == ["lscpu was not found", "too little memory"]
    _check_machine(ClusterConfig(platform="cpu", ray_address="10.0.0.1:6379"))  # it runs elsewhere


def test_wrong_settings_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-rollout", "-1"]) == 2
    assert "--num-rollout is -1" in capsys.readouterr().err


def test_a_colocated_run_cannot_be_one_step_ahead(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--colocate"], overlapped=True) == 2
    assert "--colocate: train_async.py generates while it trains" in capsys.readouterr().err


def test_the_folder_of_a_run_with_steps_is_not_taken_and_that_of_one_without_is(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vime.observability.run_folder.RunFolder", end)
    (tmp_path / "metrics.jsonl").touch()  # it failed before its first step
    assert main([*argv, "--run-dir", str(tmp_path)]) == 130
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert main([*argv, "--run-dir", str(tmp_path)]) == 2
    assert "holds the metrics of another run" in capsys.readouterr().err


def test_a_run_that_is_refused_leaves_no_folder_of_its_own_and_one_that_was_there_before(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # without --ray-address
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for folder in (new, old):
        assert main([*argv, "--run-dir", str(folder)]) == 2
        assert "RAY_ADDRESS is auto" in capsys.readouterr().err
    assert not new.exists() and (old / "config.yaml").is_file()


def test_a_refused_run_keeps_a_folder_with_logs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "logs").mkdir()
    assert not folder.remove_unused() and folder.path.exists()


def test_an_interrupted_look_at_the_settings_ends_in_a_sentence(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vime.cli.resolve.resolve", interrupt)
    assert main(argv) == 130
    assert capsys.readouterr().err == "vime: interrupted; nothing had been started\n"


def test_two_runs_do_not_share_a_folder(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("of the first run\n")
    if (pid := os.fork()) == 0:
        try:
            with only_run_in(folder, "--run-dir"):
                signal.pause()
        finally:
            os._exit(1)
    try:
        while not (folder / ".in_use").is_file() or not (folder / ".in_use").read_text():
            time.sleep(0.01)
        assert main([*argv, "--run-dir", str(folder)]) == 2
        assert f"--run-dir {folder} is written to by another run (process {pid} on " in capsys.readouterr().err
        assert (folder / "config.yaml").read_text() == "of the first run\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
