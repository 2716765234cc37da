"""`vime engine`: an engine for runs that use it by address (--rollout-external-engine-addrs)."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vime.config import Config
from vime.config.validate_cluster import key_file_problem
from vime.errors import ConfigError, VimeError

# Settings of a run that an engine reads; the --vllm-* ones besides.
_READ = (
    "checkpoint.hf_checkpoint",
    "cluster.platform",
    "cluster.rollout_num_gpus_per_engine",
    "data.rollout_seed",
    "rollout.rollout_max_context_len",
    "rollout.rollout_top_k",
    "log.engine_start_timeout_s",
    "megatron.bf16",
    "train.use_rollout_routing_replay",
    "train.aligned",
)

_DESCRIPTION = """\
Serve a checkpoint for runs that name this engine by --rollout-external-engine-addrs. It opens the doors that a run's
own engines have, behind the key in --key-file, and goes on serving when a run ends. Settings of a run that it reads:
--hf-checkpoint, --platform, --bf16, --rollout-num-gpus-per-engine (the first so many visible devices), --rollout-seed,
--rollout-max-context-len, --use-rollout-routing-replay, --engine-start-timeout-s and --vllm-*; give the trainer the
same ones."""


def run(argv: Sequence[str]) -> int:
    """`vime engine`. Returns: 0 when it was told to end, 1 if the engine died; wrong settings raise ConfigError."""
    parser = argparse.ArgumentParser(
        prog="vime engine",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, one that the trainer reaches")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; default: a free one")
    parser.add_argument("--key-file", required=True, help="file with the key; if there is none, a random one is made")
    parser.add_argument("--log-file", default="vime_engine.log", help="file the server's output is appended to")
    own, rest = parser.parse_known_args(argv)
    config = _config(rest)
    _check_address(own.host, own.port)
    key = _key(Path(own.key_file))

    from vime.config.hf import local_checkpoint
    from vime.config.validate_model import check_head_size
    from vime.config.validate_routing import check_rollout_routing_replay
    from vime.engine.vllm.server import EngineServer
    from vime.engine.vllm.versions import adapter_for
    from vime.models import family_of
    from vime.orchestration.engine_settings import engine_arguments
    from vime.platform import get_platform

    platform = get_platform(config.cluster.platform)
    if missing := platform.missing():
        raise ConfigError(missing)
    folder = local_checkpoint(config.checkpoint.hf_checkpoint)
    hf_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    routed_experts = config.train.use_rollout_routing_replay
    shape = family_of(hf_config).settings(hf_config).transformer
    problems = [
        *check_head_size(config, shape, platform.engine_head_sizes),
        *check_rollout_routing_replay(config, shape, adapter_for().routed_experts_problem(platform.device_type)),
    ]
    if problems:
        raise ConfigError(problems)
    server = EngineServer(
        str(folder),
        arguments=engine_arguments(config, platform, hf_config),
        environment=platform.engine_environment(
            config.cluster.rollout_num_gpus_per_engine, routed_experts=routed_experts
        )
        | (platform.aligned_engine()[1] if config.train.aligned else {}),
        routed_experts=routed_experts,
        key=key,
        log_path=Path(own.log_file).resolve(),
        host=own.host,
        port=own.port,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end cleanly, as with ctrl-C
    try:
        server.start()
        print(f"vime engine: starting; its log is {server.log_path}", flush=True)
        server.wait_ready(config.log.engine_start_timeout_s)
        address = server.url.removeprefix("http://")
        print(
            f"vime engine: ready; give the trainer --rollout-external-engine-addrs {address} "
            f"--rollout-external-engine-key-file {own.key_file}",
            flush=True,
        )
        while True:
            server.check_alive()
            time.sleep(1.0)
    except KeyboardInterrupt:
        print("vime engine: stopping", file=sys.stderr, flush=True)
        return 0
    except VimeError as error:
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        server.stop()


def _config(words: Sequence[str]) -> Config:
    from vime.cli.parse import Catalogue, parse
    from vime.cli.resolve import build_config

    parsed = parse(words, Catalogue())
    problems = [
        *parsed.problems,
        *(
            f"--{given.flag.name} is a setting of a run, which an engine does not read; leave it out"
            for key, given in parsed.given.items()
            if key.removeprefix("vime.") not in _READ and given.flag.owner != "vllm"
        ),
    ]
    config = build_config(parsed)
    if not config.checkpoint.hf_checkpoint:
        problems.append("--hf-checkpoint is required: an HF checkpoint folder or a hub name")
    if problems:
        raise ConfigError(problems)
    return config


def _check_address(host: str, port: int) -> None:
    """Raises: ConfigError if nothing can listen there."""
    if host in ("0.0.0.0", "::"):
        raise ConfigError(f"--host {host} is every interface; name the one address at which trainers reach this engine")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on ({error.strerror}); is another program there? "
            "`ss -ltnp` lists them"
        ) from error


def _key(path: Path) -> str:
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    if problem := key_file_problem(path):
        raise ConfigError(f"--key-file: {problem}")
    return path.read_text(encoding="utf-8").strip()
