"""A tiny character model and addition problems, and `train.py` run as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _python_path() -> str:
    """With this folder on it, where the rewards of these tests are."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, `data/train.jsonl` and `data/heldout.jsonl`."""
    folder = tmp_path_factory.mktemp("task")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "quickstart"))
        from problems import write_problems

        write_problems(folder / "data", seed=0)
    command = [sys.executable, "-m", "vime.cli.main", "init-model", str(folder / "model"), "--seed", "0"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def grpo_flags(task: Path) -> list[str]:
    """Flags of a GRPO run of seconds; everything but its length and folder.

    Rewards differ between samples, and a rollout feeds two optimizer steps under a schedule, so that losses, rates and
    counts all say something.
    """
    recipe = (ROOT / "examples" / "quickstart" / "grpo.yaml").read_text()
    (task / "grpo.yaml").write_text("".join(x for x in recipe.splitlines(True) if not x.startswith("rm-type")))
    return [
        *("--config", str(task / "grpo.yaml"), "--platform", "cpu", "--hf-checkpoint", str(task / "model")),
        *("--prompt-data", str(task / "data" / "train.jsonl")),
        *("--eval-prompt-data", "heldout", str(task / "data" / "heldout.jsonl")),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--max-tokens-per-gpu", "512"),
        *("--custom-rm-path", "e2e_rewards.share_of_even_tokens", "--weight-probe-interval", "1"),
        *("--num-steps-per-rollout", "2", "--lr", "1e-3", "--lr-warmup-iters", "0", "--lr-decay-style", "cosine"),
        *("--use-kl-loss", "--kl-loss-coef", "0.01", "--entropy-coef", "0.001"),
    ]


@pytest.fixture(scope="session")
def start_train() -> Callable[..., subprocess.Popen[str]]:
    """A function (*flags, environment, program) that starts train.py, or train_async.py, in a process group of its own.

    Its output is piped.
    """

    def start(
        *flags: str, environment: Mapping[str, str] = os.environ, program: str = "train.py"
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, program, *flags],
            cwd=ROOT,
            env={**environment, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": _python_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.fixture(scope="session")
def run_train(start_train: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """As `start_train`, but runs to the end and gives the output; any exit code but 0 fails the test."""

    def run(*flags: str, program: str = "train.py") -> str:
        process = start_train(*flags, program=program)
        output, _ = process.communicate(timeout=900)  # a run takes half a minute where nothing else runs
        assert process.returncode == 0, output
        return output

    return run


@pytest.fixture(scope="session")
def finished(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The run folder and output of three rollouts with two engines, checkpoints after each, and an HF export."""
    folder = tmp_path_factory.mktemp("finished")
    output = run_train(
        *grpo_flags,
        *("--run-dir", str(folder), "--num-rollout", "3", "--eval-interval", "2", "--rollout-num-gpus", "2"),
        *("--use-tensorboard", "--trace"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "2", "--async-save"),
        *("--save-hf", str(folder / "hf")),
    )
    return folder, output
