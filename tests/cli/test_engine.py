"""`vime engine`: what it says before it starts anything."""

import socket
from pathlib import Path

import pytest

from tests.conftest import save_tiny_model
from vime.cli.engine import _key, run
from vime.errors import ConfigError


def test_settings_that_an_engine_does_not_read_are_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["--key-file", str(tmp_path / "key"), "--lr", "1e-3", "--rollout-batch-size", "8"])
    text = "\n".join(caught.value.problems)
    for part in ("--lr is a setting of a run", "--rollout-batch-size is a setting", "--hf-checkpoint is required"):
        assert part in text
    assert not (tmp_path / "key").exists()


def test_a_port_in_use_and_an_address_of_everybody_are_named(tmp_path: Path) -> None:
    words = ["--hf-checkpoint", str(tmp_path), "--key-file", str(tmp_path / "key")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--port {port} cannot be listened on .Address already in use"):
            run([*words, "--port", port])
    with pytest.raises(ConfigError, match="is every interface"):
        run([*words, "--host", "0.0.0.0"])


def test_routed_experts_are_asked_of_a_mixture_on_settings_that_return_them(tiny_qwen3: Path, tmp_path: Path) -> None:
    words = ["--hf-checkpoint", str(tiny_qwen3), "--key-file", str(tmp_path / "key"), "--platform", "cpu"]
    with pytest.raises(ConfigError) as caught:
        run([*words, "--use-rollout-routing-replay", "--no-vllm-enable-prefix-caching"])
    has_none, needs_cache = caught.value.problems
    assert f"the checkpoint {tiny_qwen3} has none" in has_none
    assert needs_cache.startswith("--no-vllm-enable-prefix-caching")


def test_heads_that_no_engine_can_take_are_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", head_dim=16)
    with pytest.raises(ConfigError, match=r"attention heads of 16 numbers .* take 32, 64"):
        run(["--hf-checkpoint", str(folder), "--key-file", str(tmp_path / "key"), "--platform", "cpu"])


def test_a_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = _key(path)
    assert len(key) > 30 and path.stat().st_mode & 0o777 == 0o600
    assert _key(path) == key
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        _key(path)
