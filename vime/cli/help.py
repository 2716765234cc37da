"""The flag tables as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence

from vime.cli.flag import Flag
from vime.cli.megatron_flags import megatron_flags
from vime.cli.router_flags import router_flags
from vime.cli.vime_flags import section_classes, vime_flags
from vime.cli.vllm_flags import vllm_flags

USAGE = """\
usage: python train.py --hf-checkpoint FOLDER --prompt-data FILE --rm-type NAME --rollout-batch-size N
           --n-samples-per-prompt N --num-rollout N --lr X [settings]

Settings are given as --name value, or as `name: value` in YAML files (--config file.yaml, repeatable; flags win).
train_async.py takes the same and generates one rollout ahead of the trainer.
Further tables: --help-megatron (model parallelism, optimizer), --help-vllm (--vllm-*), --help-router (--router-*).
"""


def flag_table(flags: Iterable[Flag], headings: dict[str, str] | None = None) -> str:
    """One paragraph per flag under its group's heading: name, what it takes, default, help."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    lines: list[str] = []
    group = None
    for flag in flags:
        if flag.refusal.startswith("Megatron-LM calls it"):
            continue
        if flag.group != group:
            group = flag.group
            lines += ["", (headings or {}).get(group, group) + ":"]
        lines.append(f"  --{flag.name}{_takes(flag)}")
        text = " ".join(flag.help.split())
        if flag.refusal:
            text = f"Not settable: {flag.refusal}"
        elif flag.value is None and flag.default not in (None, "", [], {}, False):
            text = f"{text} (default: {flag.default})" if text else f"default: {flag.default}"
        lines += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def _takes(flag: Flag) -> str:
    if flag.kind == "bool":
        return "" if flag.value is not None else f", --{flag.negation}"
    word = "{" + ",".join(str(c) for c in flag.choices) + "}" if flag.choices else flag.kind.upper()
    word = "NAME=NUMBER" if flag.kind == "weights" else word
    return f" {word} ..." if flag.is_list or flag.kind == "weights" else f" {word}"


def print_help(argv: Sequence[str]) -> None:
    """Print the table that a --help flag asks for and exit with 0; do nothing when there is none."""
    tables: dict[str, Callable[[], dict[str, Flag]]] = {
        "--help": vime_flags,
        "--help-megatron": megatron_flags,
        "--help-vllm": vllm_flags,
        "--help-router": router_flags,
    }
    for word in argv:
        if word in ("-h", *tables):
            word = "--help" if word == "-h" else word
            docs = {name: (cls.__doc__ or "").strip() for name, cls in section_classes().items()}
            headings = {name: f"{name}: {doc.split('. ')[0].rstrip('.')}" for name, doc in docs.items()}
            text = flag_table(tables[word]().values(), headings)
            print(USAGE + text if word == "--help" else text.lstrip("\n"), end="")
            raise SystemExit(0)
