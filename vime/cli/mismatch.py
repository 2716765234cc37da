"""`vime mismatch`: how far a run's engine log-probs are from HF transformers' on the same tokens and weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.errors import ConfigError, VimeError

_DESCRIPTION = """\
Compares log-probs of a run's rollouts: what the engine said when it sampled them, and what HF transformers says of the
same tokens under the same weights, in the run's dtype and in float32, beside the run's own difference of trainer and
engine. It needs rollouts (kept unless --no-save-rollouts) and weights saved during training, such as by --save-hf
'FOLDER/{rollout_id}' --save-hf-interval 20 or by --save. Weights saved after rollout 19 sampled rollout 20; the
versions stamped on the tokens say so, and what does not match is not compared."""


def run(argv: Sequence[str]) -> int:
    """`vime mismatch RUN …`. Returns: the exit code."""
    arguments = _parser().parse_args(argv)
    from vime.agreement.compare import Wishes, compare, planned
    from vime.agreement.comparison import as_text, summary
    from vime.agreement.run_files import RunFiles
    from vime.observability.run_folder import whole

    if arguments.max_samples < 0:
        raise ConfigError(f"--max-samples is {arguments.max_samples}; give 1 or more, or 0 for all")
    files = RunFiles(arguments.run)
    hf_checkpoint = _hf_checkpoint(arguments.hf_checkpoint, files.config.checkpoint.hf_checkpoint)
    pairs, notes = planned(files, hf_checkpoint, arguments.step)
    wishes = Wishes(steps=arguments.step, max_samples=arguments.max_samples or None, device=_device(arguments.device))
    for note in notes:
        print(f"not compared: {note}")
    comparisons = []
    out: Path = arguments.out or arguments.run / "mismatch" / "report.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for pair in pairs:
            comparisons.append(compare(files, pair, hf_checkpoint, wishes))
            print(as_text(comparisons[-1]), flush=True)
            report: dict[str, Any] = {"run": str(arguments.run), "steps": [c.to_json() for c in comparisons]}
            with whole(out) as path:
                path.write_text(json.dumps(report | {"not compared": notes}, indent=2) + "\n", encoding="utf-8")
    except VimeError as error:
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"\n{summary(comparisons)}\n\n{out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime mismatch",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--step", type=int, nargs="+", help="rollouts to compare; default: one for each saved version")
    parser.add_argument("--max-samples", type=int, default=256, help="of each rollout (default: %(default)s); 0: all")
    parser.add_argument("--hf-checkpoint", type=Path, help="what training started from, where it is elsewhere now")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="to compute on")
    parser.add_argument("--out", type=Path, help="JSON file to write; default: RUN/mismatch/report.json")
    return parser


def _hf_checkpoint(given: Path | None, of_run: str) -> Path | None:
    """What training started from, as a folder; None if nobody says where it is now. Raises: ConfigError."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise ConfigError(f"--hf-checkpoint {given} holds no config.json; give the HF checkpoint's folder")
        return given
    from vime.config.hf import local_checkpoint

    try:
        return local_checkpoint(of_run)
    except ConfigError as error:
        print(f"not compared: the checkpoint that training started from is not here ({error.problems[0]})")
        return None


def _device(wanted: str) -> str:
    """Raises: ConfigError for CUDA where there is none."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no CUDA device; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
