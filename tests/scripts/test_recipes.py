"""Every recipe of scripts/, without weights and without GPUs: what train.py would check, layout, counts and memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vime.cli.main import main
from vime.cli.recipes import Recipe, read_recipe, recipes
from vime.errors import ConfigError
from vime.models import family_of
from vime.models.division import Division, rank_parameters
from vime.models.parameters import parameters

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
RECIPES = recipes(SCRIPTS)
# Counted by transformers 5 on models of these shapes, without the layers of multi-token prediction.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "glm-4.5-air": 106_852_245_504,
}


def edited(recipe: Recipe, folder: Path, *changes: tuple[str, str]) -> Recipe:
    """The recipe with some of its text replaced; each must be there."""
    text = recipe.path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) >= 1, f"{recipe.path} has no {old!r}"
        text = text.replace(old, new)
    path = folder / recipe.path.name
    path.write_text(text, encoding="utf-8")
    (folder / "models").symlink_to(SCRIPTS / "models")
    return read_recipe(path)


def recipe_of(name: str) -> Recipe:
    return next(recipe for recipe in RECIPES if recipe.name == name)


def test_the_recipes_are_those_that_the_docs_speak_of() -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert {f"scripts/{name}" for name in re.findall(r"scripts/([\w.-]+\.yaml)", page)} >= {
        f"scripts/{recipe.path.name}" for recipe in RECIPES
    }
    assert len(RECIPES) == 7


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_passes_every_check_and_fits_the_machines_that_it_states(recipe: Recipe) -> None:
    assert recipe.problems() == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_megatron_takes_a_recipes_settings_as_well(recipe: Recipe) -> None:
    """Its own objects check what belongs together when they are made; no device is needed for that."""
    from vime.trainer.megatron.settings import megatron_settings

    config, plan = recipe.plan()
    made = megatron_settings(recipe.model, config.megatron, device_type="cuda", world_size=plan.division.world_size)
    assert made.optimizer.optimizer_cpu_offload == (plan.training.optimizer_offload_fraction > 0)
    assert (made.transformer.recompute_granularity, made.transformer.bf16) == (
        plan.training.recompute.granularity,
        True,
    )
    assert made.transformer.expert_model_parallel_size == plan.division.expert


def test_the_command_in_a_recipes_head_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = recipe_of("glm-4.5-air-separate")
    command = re.search(r"^#   vime (plan .*)$", recipe.path.read_text("utf-8"), re.MULTILINE)
    assert command is not None
    words = [*command[1].split(), "--hf-checkpoint", str(recipe.shape)]
    assert main(words) == 0
    assert "fits: " in capsys.readouterr().out
    assert main([*words, "--host-memory-gib", "1024"]) == 1
    assert main([*words, "--nodes", "1"]) == 2
    assert "needs 16 devices (8 to train, 8 for engines)" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_says_how_to_start_it_and_writes_to_folders_of_its_own(recipe: Recipe) -> None:
    text = recipe.path.read_text("utf-8")
    assert f"#   python train.py --config scripts/{recipe.path.name}\n" in text
    assert f"\nrun-dir: runs/{recipe.name}/{{time}}\n" in text
    assert len(re.findall(rf"^(?:save|load): runs/{recipe.name}/checkpoints\b", text, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_models_parameters_are_counted_exactly(name: str) -> None:
    hf = json.loads((SCRIPTS / "models" / name / "config.json").read_text("utf-8"))
    settings = family_of(hf).settings(hf)
    assert parameters(settings).total == rank_parameters(settings, Division(), 0).total == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_reads_a_models_config_as_its_family_does(name: str) -> None:
    from transformers import AutoConfig

    folder = SCRIPTS / "models" / name
    hf = json.loads((folder / "config.json").read_text("utf-8"))
    theirs = AutoConfig.from_pretrained(folder)
    assert theirs.model_type == family_of(hf).model_type
    assert theirs.architectures == [family_of(hf).architecture]
    ours = family_of(hf).settings(theirs.to_dict() | {"architectures": hf["architectures"]})
    assert ours == family_of(hf).settings(hf)


def test_every_shape_belongs_to_a_recipe() -> None:
    assert (
        {recipe.shape.name for recipe in RECIPES} == set(PARAMETERS) == {p.name for p in (SCRIPTS / "models").iterdir()}
    )


def test_a_device_that_is_too_small_is_named_with_what_is_missing(tmp_path: Path) -> None:
    recipe = edited(recipe_of("glm-4.5-air"), tmp_path, ("--device-memory-gib 139", "--device-memory-gib 79"))
    (of_device, of_cache) = recipe.problems()
    assert re.search(r"a device of pipeline rank 0 needs \d+\.\d GiB, \d+\.\d GiB more than it has", of_device)
    assert "--vllm-kv-cache-memory-bytes is 12.0 GiB, but an engine's share of 0.3 leaves 0.0 GiB" in of_cache


def test_half_of_the_smallest_recipes_tokens_and_cache_fit_into_80_gb(tmp_path: Path) -> None:
    smaller = ("--device-memory-gib 139", "--device-memory-gib 79")
    halves = ("max-tokens-per-gpu: 16384", "max-tokens-per-gpu: 8192"), ("42949672960", "21474836480")
    assert edited(recipe_of("qwen3-0.6b"), tmp_path, smaller, *halves).problems() == []


def test_a_host_that_is_too_small_is_named(tmp_path: Path) -> None:
    recipe = edited(recipe_of("glm-4.5-air"), tmp_path, ("--host-memory-gib 2000", "--host-memory-gib 1024"))
    (problem,) = recipe.problems()
    assert re.search(r"a training node needs 16\d\d\.\d GiB of host memory, but has 1024.0 GiB", problem)


def test_optimizer_states_that_stay_on_the_devices_do_not_fit(tmp_path: Path) -> None:
    recipe = edited(recipe_of("glm-4.5-air-separate"), tmp_path, ("offload-fraction: 1.0", "offload-fraction: 0.4"))
    assert any("more than it has" in problem for problem in recipe.problems())


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "qwen3-4b",
            "tensor-model-parallel-size: 2 ",
            "tensor-model-parallel-size: 3 ",
            "does not divide the 8 training",
        ),
        (
            "qwen3-30b-a3b",
            "expert-model-parallel-size: 8 ",
            "expert-model-parallel-size: 3 ",
            "--expert-model-parallel",
        ),
        ("qwen3-30b-a3b", "per-engine: 2 ", "per-engine: 3 ", "3 devices per engine"),
        ("qwen3-4b-separate", "--devices-per-node 8", "--devices-per-node 4", "needs 8 devices.*10.0.0.1: 4"),
        ("glm-4.5-air-separate", "ray-address: auto ", "ray-address: null ", "joins a Ray cluster; give --ray-address"),
        ("qwen3-0.6b", "rm-type: gsm8k", "rm-type: gms8k", "--rm-type is 'gms8k'"),
        ("qwen3-0.6b", "vllm-kv-cache-memory-bytes:", "vllm-kv-cache-memory-byte:", "vllm-kv-cache-memory-bytes"),
        ("qwen3-0.6b", "clip-grad:", "clip-gard:", "clip-grad"),
        ("qwen3-0.6b", "max-tokens-per-gpu: 16384", "max-tokens-per-gpu: 1024", "a sample may have 1536 tokens"),
    ],
)
def test_what_could_not_run_fails_with_the_reason(name: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    problems = edited(recipe_of(name), tmp_path, (old, new)).problems()
    assert re.search(message, "\n".join(problems)), problems


def test_a_recipe_without_its_machines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its head needs a line"):
        edited(recipe_of("qwen3-4b"), tmp_path, (" --host-memory-gib 256", ""))
