"""The vime command: its tables, what they import, and what the subcommands print."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.help import flag_table
from vime.cli.main import main
from vime.cli.vime_flags import vime_flags

HEAVY = ("torch", "vllm", "megatron.core", "transformers", "ray", "numpy", "pyarrow")


def run_and_list_heavy_imports(code: str) -> tuple[str, list[str]]:
    """What `code` prints before it exits, and which heavy packages it imported."""
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as e:\n    assert e.code == 0\n"
        f"print('\\nIMPORTED', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    text, _, imported = done.stdout.partition("\nIMPORTED ")
    return text, eval(imported)


@pytest.mark.parametrize("code", ["from vime.cli.main import main; main(['--help'])"])
def test_help_lists_the_subcommands_and_imports_nothing_heavy(code: str) -> None:
    text, imported = run_and_list_heavy_imports(code)
    assert imported == []
    assert all(name in text for name in ("config", "init-model", "doctor", "--help-megatron"))


def test_the_module_runs_the_same_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "vime", "converter"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "vime: there is no command 'converter'; did you mean convert?\n"


def test_the_settings_help_is_grouped_and_imports_nothing_heavy() -> None:
    text, imported = run_and_list_heavy_imports("from vime.cli.resolve import resolve; resolve(['--help'])")
    assert imported == []
    for heading in ("cluster: ", "rollout: ", "algo: ", "sync: "):
        assert f"\n{heading}" in text
    assert "--rollout-batch-size INT" in text and "--loss-type {policy_loss,sft_loss,custom_loss}" in text


@pytest.mark.parametrize(
    ("word", "flag"), [("--help-megatron", "--tensor-model-parallel-size"), ("--help-router", "--router-policy")]
)
def test_other_owners_tables_are_printed(word: str, flag: str) -> None:
    text, imported = run_and_list_heavy_imports(f"from vime.cli.main import main; main([{word!r}])")
    assert f"\n  {flag} " in text
    assert imported == []


def test_the_vllm_table_is_printed_without_importing_vllm_here() -> None:
    text, imported = run_and_list_heavy_imports("from vime.cli.main import main; main(['--help-vllm'])")
    assert "--vllm-gpu-memory-utilization FLOAT" in text
    assert "Not settable: use --hf-checkpoint" in text
    assert imported == []


def test_public_flags_change_only_on_purpose() -> None:
    """A new, renamed or removed flag of vime's own must show in the diff of flags.txt."""
    snapshot = Path(__file__).parents[1] / "config" / "flags.txt"
    assert snapshot.read_text().split() == sorted(f"--{name}" for name in vime_flags())


def test_every_setting_has_a_help_text() -> None:
    assert [flag.name for flag in vime_flags().values() if not flag.help] == []
    assert "--n-samples-per-prompt" in flag_table(vime_flags().values())


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["confg"]) == 2
    assert "did you mean config?" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "python train.py" in capsys.readouterr().err


def test_config_prints_values_with_origins_and_yaml_that_reads_back(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *argv, "--disable-bias-linear"]) == 0
    text = capsys.readouterr().out
    assert "rollout-batch-size: 4  # command line" in text
    assert "# eps-clip: 0.2  # default" in text
    assert "disable-bias-linear: true  # command line" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert main(["config", "--json", "--config", str(again)]) == 0
    second = json.loads(capsys.readouterr().out)
    assert main(["config", "--json", *argv, "--disable-bias-linear"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert {k: v for k, v in first.items() if k != "origin"} == {k: v for k, v in second.items() if k != "origin"}
    assert first["model"]["num_layers"] == 4


def test_config_reports_problems_with_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *argv, "--sed", "1"]) == 2
    assert "did you mean --seed?" in capsys.readouterr().err


def test_config_looks_for_the_checkpoint_of_load_as_a_run_does(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty := tmp_path / "checkpoints").mkdir()
    assert main(["config", *argv, "--load", str(empty)]) == 2
    assert f"--load {empty}: no checkpoint there" in capsys.readouterr().err
    assert main(["config", *argv, "--load", str(empty), "--save", str(empty)]) == 0
