"""vLLM's engine flags under `--vllm-`, read from vLLM itself in a process of its own and cached.

Importing vLLM takes many seconds and starts threads, so the table is made by `python -m vime.cli.vllm_flags`, only
when a `--vllm-*` name is used, and kept in the user's cache folder under vLLM's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from vime.cli.flag import Flag
from vime.errors import ConfigError

_TABLE_FORMAT = 1
_TIMEOUT_S = 300
_MARK = "VIME-VLLM-FLAGS "

OWNED = {
    "model": "use --hf-checkpoint",
    "model_weights": "use --hf-checkpoint",
    "tokenizer": "the checkpoint's own is used; use --hf-checkpoint",
    "hf_config_path": "use --hf-checkpoint",
    "served_model_name": "vime names the model itself",
    "seed": "use --rollout-seed",
    "max_model_len": "use --rollout-max-context-len",
    "tensor_parallel_size": "use --rollout-num-gpus-per-engine",
    "pipeline_parallel_size": "an engine's devices are tensor-parallel; use --rollout-num-gpus-per-engine",
    "data_parallel_size": "use --rollout-num-gpus: more devices are more engines",
    "nnodes": "an engine stays on one node",
    "node_rank": "an engine stays on one node",
    "master_addr": "an engine stays on one node",
    "master_port": "an engine stays on one node",
    "worker_extension_cls": "vime loads weights through its own; a plug-in of vLLM's can add others",
    "weight_transfer_config": "use --update-weight-transport",
    "logprobs_mode": "always processed_logprobs: the log-probs of what was sampled from",
    "enable_sleep_mode": "it follows from --colocate and --offload-rollout",
    "skip_tokenizer_init": "vime needs the tokenizer for stop strings and response texts",
    "runner": "always generate",
    "dtype": "engines serve in the dtype that is trained in: the checkpoint's, or --bf16 or --no-bf16",
    "quantization": "engines serve the weights that are trained, unquantized; anything else samples another policy",
    "enable_return_routed_experts": "it follows --use-rollout-routing-replay",
}

# Flags of vLLM's server, which are no engine arguments.
_SERVER_OWNED = {
    "host": "engines listen where vime reaches them (127.0.0.1 on one node)",
    "port": "engines take a free port",
    "api-key": "vime makes a key for each run and guards every path with it",
    "middleware": "vime makes a key for each run and guards every path with it",
}


def vllm_flags() -> dict[str, Flag]:
    """Every engine argument of the installed vLLM, by flag name. Raises: ConfigError when vLLM cannot be read."""
    flags = {}
    for row in _table():
        name = "vllm-" + row["key"].replace("_", "-")
        flags[name] = Flag(
            name=name,
            owner="vllm",
            key=row["key"],
            kind=row["kind"],
            is_list=row["is_list"],
            takes_sizes=row["takes_sizes"],
            choices=tuple(row["choices"]),
            default=row["default"],
            help=row["help"],
            group=row["group"],
            refusal=OWNED.get(row["key"], ""),
        )
    for key, why in _SERVER_OWNED.items():
        name = f"vllm-{key}"
        flags.setdefault(name, Flag(name=name, owner="vllm", key=key, kind="str", group="Server", refusal=why))
    return flags


def _table() -> list[dict[str, Any]]:
    """The rows of `read_engine_arguments`, from the cache if this vLLM was read before."""
    path = _cache_path()
    try:
        cached = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(cached, list) and cached:
            return cached
    except (OSError, ValueError):
        pass  # not there yet, or damaged: read vLLM again and write it anew
    command = [sys.executable, "-m", "vime.cli.vllm_flags", "--help"]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--vllm-* flags: vLLM could not be read within {_TIMEOUT_S} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise ConfigError(f"--vllm-* flags: vLLM could not be read (exit {done.returncode}): {tail}")
    rows: list[dict[str, Any]] = json.loads(lines[-1][len(_MARK) :])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(rows), encoding="utf-8")
        partial.replace(path)
    except OSError:
        pass  # a home that cannot be written only costs the seconds again
    return rows


def _cache_path() -> Path:
    """One file per vLLM build and Python."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("--vllm-* flags need vLLM, which is not installed; install vime[cpu] or vime[cuda]")
    builds = sorted(set(importlib.metadata.packages_distributions().get("vllm", [])))
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in builds]
    key = f"{_TABLE_FORMAT} {versions} {platform.python_version()} {sys.prefix}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "vime" / f"vllm-flags-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read_engine_arguments() -> list[dict[str, Any]]:
    """Import vLLM and describe each field of AsyncEngineArgs that has a flag."""
    import argparse
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: Any = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
    AsyncEngineArgs.add_cli_args(parser)
    groups = {action.dest: group.title for group in parser._action_groups for action in group._group_actions}
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    rows = []
    for action in parser._actions:
        if action.dest not in fields:
            continue
        kind, takes_sizes = ("bool", False) if action.nargs == 0 else _kind(action.type)
        help_text = action.help if action.help not in (None, argparse.SUPPRESS) else ""
        rows.append(
            {
                "key": action.dest,
                "kind": "any" if action.nargs == "?" else kind,
                "is_list": action.nargs in ("+", "*"),
                "takes_sizes": takes_sizes,
                "choices": [c for c in action.choices or () if c is not None],
                "default": action.default if _is_plain(action.default) else str(action.default),
                "help": " ".join(str(help_text).replace("%%", "%").split()),
                "group": groups.get(action.dest) or "",
            }
        )
    return rows


def _kind(convert: Any) -> tuple[str, bool]:
    """What a converter makes of sample words: (kind, takes sizes such as 1k). Its source is wrapped in closures."""
    if convert is None:
        return "str", False

    def accepts(word: str) -> Any:
        try:
            return convert(word)
        except Exception:  # any refusal means no: each converter has its own error
            return None

    if (as_object := accepts("{}")) is not None:
        if isinstance(as_object, str):
            return "str", False
        return ("any" if accepts("a word") is not None else "json"), False
    if isinstance(accepts("7"), int):
        return "int", accepts("1k") == 1000
    if isinstance(accepts("0.5"), float):
        return "float", False
    # A dataclass with required fields refuses {}; numbers and text are told apart above.
    return ("str" if isinstance(accepts("a word"), str) else "json"), False


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


if __name__ == "__main__":
    print(_MARK + json.dumps(read_engine_arguments(), default=str))
