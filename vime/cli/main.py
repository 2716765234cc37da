"""The `vime` command. Each subcommand's module is imported when it is run, so that `vime --help` is instant."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from vime.errors import ConfigError

# name -> (module with `run(argv) -> exit code`, one line for --help)
COMMANDS = {
    "eval": ("vime.cli.evaluate", "evaluate an HF checkpoint on held-out sets, with engines alone"),
    "config": ("vime.cli.show_config", "print the resolved configuration and where each value comes from"),
    "plan": ("vime.cli.plan", "estimate the memory of each training device, part by part, without devices"),
    "init-model": ("vime.cli.init_model", "make a tiny random HF checkpoint with tokenizer and chat template"),
    "convert": ("vime.cli.convert", "make a training checkpoint of an HF one, or an HF one of a training checkpoint"),
    "mismatch": ("vime.cli.mismatch", "find out what log-probs of engine, trainer and HF differ by, and from what"),
    "engine": ("vime.cli.engine", "serve a checkpoint for runs that use it by address"),
    "buffer": ("vime.cli.buffer", "say what became of every prompt of a run, and check that none is lost or doubled"),
    "doctor": ("vime.cli.doctor", "say what this machine lacks, and how to get it"),
}

_USAGE = """\
usage: vime COMMAND ...

{commands}

`vime COMMAND --help` says more. Training is started by train.py; its settings are listed by `vime config --help`, and
those of Megatron, vLLM and vllm-router by `vime --help-megatron`, `vime --help-vllm` and `vime --help-router`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns: the exit code; 2 for wrong settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:
        sys.path.insert(0, "")  # users' functions are looked for where the command is given, as `python train.py` does
    try:
        if words and words[0] in ("--help-megatron", "--help-vllm", "--help-router"):
            from vime.cli.help import print_help

            print_help(words[:1])
        if not words or words[0] in ("-h", "--help"):
            width = max(map(len, COMMANDS))
            print(
                _USAGE.format(commands="\n".join(f"  {n:<{width}}  {text}" for n, (_, text) in COMMANDS.items())),
                end="",
            )
            return 0 if words else 2
        if words[0] == "--version":
            from vime import __version__

            print(f"vime {__version__}")
            return 0
        if words[0] not in COMMANDS:
            import difflib

            close = difflib.get_close_matches(words[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
            hint = "training is started by `python train.py`" if words[0] == "train" else hint
            print(f"vime: there is no command {words[0]!r}; {hint}", file=sys.stderr)
            return 2
        return int(importlib.import_module(COMMANDS[words[0]][0]).run(words[1:]))
    except ConfigError as error:
        for problem in error.problems:
            print(f"vime: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail, too
        return 1
    except OSError as error:
        if error.filename is None:  # of no file that somebody named
            raise
        print(f"vime: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
