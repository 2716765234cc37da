"""`vime mismatch`: who differs from whom on the same tokens under the same weights, where, and from what."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import ConfigError, VimeError

if TYPE_CHECKING:
    from vime.agreement.analysis import Analysis, Means
    from vime.config import Config

_DESCRIPTION = """\
Compares log-probs of the same tokens under the same weights: what the engine said when it sampled them, what the
trainer's model says, and HF transformers in the run's dtype and in a wider one. Says where they differ, and from what.

RUN needs rollouts (kept unless --no-save-rollouts) and weights saved during training, such as by --save-hf
'FOLDER/{rollout_id}' --save-hf-interval 20, or by --save. Weights saved after rollout 19 sampled rollout 20; the
versions stamped on the tokens say so, and what does not match is not compared.

CHECKPOINT is an HF checkpoint: --rollouts names a file that it sampled, or an engine is started that samples some."""
_OWN_CONTEXT = 1024
_MIN_TEMPERATURE = 1e-3


def run(argv: Sequence[str]) -> int:
    """`vime mismatch RUN_OR_CHECKPOINT …`. Returns: the exit code."""
    arguments = _parser().parse_args(argv)
    _check(arguments)
    from vime.agreement.comparison import summary
    from vime.agreement.text import analysis_text
    from vime.observability.run_folder import whole

    is_run = (arguments.target / "config.yaml").is_file()
    out: Path = arguments.out or (arguments.target / "mismatch" if is_run else Path("mismatch"))
    report: dict[str, Any] = {"of": str(arguments.target), "steps": []}
    analyses: list[Analysis] = []
    try:
        for analysis in _of_run(arguments, report) if is_run else _of_checkpoint(arguments):
            analyses.append(analysis)
            print(analysis_text(analysis), flush=True)
            report["steps"].append(analysis.to_json())
            out.mkdir(parents=True, exist_ok=True)
            with whole(out / "report.json") as path:
                path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            _draw(analysis, out)
    except ConfigError:
        raise
    except VimeError as error:
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"\n{summary([a.comparison for a in analyses])}\n\n{out / 'report.json'}")
    return 0


def _draw(analysis: Analysis, out: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return
    from vime.agreement.picture import draw

    step = analysis.comparison.step
    draw(analysis, out / ("mismatch.png" if step is None else f"step_{step:06d}.png"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime mismatch",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder, or an HF checkpoint's")
    parser.add_argument("--step", type=int, nargs="+", help="rollouts to compare; default: one for each saved version")
    parser.add_argument("--max-samples", type=int, default=256, help="of each rollout (default: %(default)s); 0: all")
    parser.add_argument("--hf-checkpoint", type=Path, help="what training started from, where it is elsewhere now")
    parser.add_argument("--rollouts", type=Path, help="of a CHECKPOINT: a Parquet file of samples that it sampled")
    parser.add_argument("--temperature", type=float, default=1.0, help="of a CHECKPOINT's samples")
    parser.add_argument("--engine", action="store_true", help="also score by an engine newly started with the weights")
    parser.add_argument("--no-trainer", action="store_true", help="leave the trainer's model out")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="to compute on")
    parser.add_argument("--out", type=Path, help="folder to write; default: RUN/mismatch, or ./mismatch")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Raises: ConfigError."""
    target = arguments.target
    problems = []
    is_run, is_checkpoint = (target / "config.yaml").is_file(), (target / "config.json").is_file()
    if not is_run and not is_checkpoint:
        problems.append(f"{target} is neither a run's folder (config.yaml) nor an HF checkpoint (config.json)")
    if arguments.max_samples < 0:
        problems.append(f"--max-samples is {arguments.max_samples}; give 1 or more, or 0 for all")
    if not (arguments.temperature >= _MIN_TEMPERATURE and math.isfinite(arguments.temperature)):
        problems.append(f"--temperature is {arguments.temperature}; give a finite number, {_MIN_TEMPERATURE} or more")
    if is_run and (arguments.rollouts is not None or arguments.temperature != 1.0):
        problems.append("--rollouts and --temperature are for a CHECKPOINT; a run has its own")
    if is_checkpoint and not is_run and (arguments.step is not None or arguments.hf_checkpoint is not None):
        problems.append("--step and --hf-checkpoint are for a RUN; a checkpoint has no steps")
    if problems:
        raise ConfigError(problems)


def _of_run(arguments: argparse.Namespace, report: dict[str, Any]) -> Iterator[Analysis]:
    from vime.agreement.compare import analyse_step, planned
    from vime.agreement.run_files import RunFiles

    files = RunFiles(arguments.target)
    hf_checkpoint = _hf_checkpoint(arguments.hf_checkpoint, files.config.checkpoint.hf_checkpoint)
    pairs, weights, notes = planned(files, hf_checkpoint, arguments.step)
    report["not compared"] = notes
    for note in notes:
        print(f"not compared: {note}")
    means = _means(arguments, files.config)
    for pair in pairs:
        yield analyse_step(files, pair, weights, hf_checkpoint, means, max_samples=arguments.max_samples or None)


def _of_checkpoint(arguments: argparse.Namespace) -> Iterator[Analysis]:
    from vime.agreement.compare import analyse_checkpoint, analyse_samples
    from vime.config import Config, RolloutConfig
    from vime.config.hf import read_model_config
    from vime.observability.rollout_file import read_rollout

    folder: Path = arguments.target
    context = min(_OWN_CONTEXT, int(read_model_config(str(folder)).get("max_position_embeddings", _OWN_CONTEXT)))
    rollout = RolloutConfig(rollout_temperature=arguments.temperature, rollout_max_context_len=context)
    means = _means(arguments, Config(rollout=rollout))
    most = arguments.max_samples or None
    if arguments.rollouts is None:
        yield analyse_checkpoint(folder, means, max_samples=most)
    else:
        samples = [sample for group in read_rollout(arguments.rollouts) for sample in group.samples]
        yield analyse_samples(samples, folder, means, max_samples=most, origin=f"{folder}, on {arguments.rollouts}")


def _means(arguments: argparse.Namespace, config: Config) -> Means:
    from vime.agreement.analysis import Means
    from vime.agreement.engine import engine_starter
    from vime.platform import get_platform

    platform = get_platform(_device(arguments.device))
    return Means(
        config=config,
        platform=platform,
        with_trainer=not arguments.no_trainer,
        start_engine=engine_starter(config, platform) if arguments.engine else None,
    )


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
