"""The recipes of scripts/: what each is for, and what it takes. For their test and for the table in docs/recipes.md."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from vime.cli.on_cluster import resolve_on
from vime.cli.plan import Plan, make_plan
from vime.config import Config
from vime.config.dtype import run_dtype
from vime.config.hf import read_model_config
from vime.config.yaml_file import read_yaml
from vime.errors import ConfigError
from vime.models import ModelSettings, family_of
from vime.models.memory import GIB
from vime.models.parameters import parameters

_COMMAND = re.compile(r"^#   vime plan (--config .*)$", re.MULTILINE)
_STATED = ("--nodes", "--devices-per-node", "--device-memory-gib", "--host-memory-gib")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A YAML file of settings, with the machines that its head says it is for."""

    path: Path
    words: tuple[str, ...]
    """The settings as `vime plan` takes them."""
    nodes: int
    devices_per_node: int
    device_bytes: int
    host_bytes: int
    """Of a training node."""

    @property
    def name(self) -> str:
        """The file's, without its ending."""
        return self.path.stem

    @property
    def checkpoint(self) -> str:
        """The model's name on the hub."""
        return str(read_yaml(str(self.path), "--config")["hf-checkpoint"])

    @property
    def shape(self) -> Path:
        """A folder with the model's config.json and nothing else, which stands for the checkpoint here."""
        return self.path.parent / "models" / self.checkpoint.rpartition("/")[2].lower()

    @property
    def model(self) -> ModelSettings:
        """The model's shape."""
        hf = read_model_config(str(self.shape))
        return family_of(hf).settings(hf)

    def plan(self) -> tuple[Config, Plan]:
        """The settings that a run on the stated machines would have, and their memory.

        Raises: ConfigError with everything that such a run would refuse.
        """
        words = [*self.words, "--hf-checkpoint", str(self.shape)]
        config, _ = resolve_on(words, nodes=self.nodes, devices_per_node=self.devices_per_node)
        dtype = run_dtype(config.megatron, read_model_config(str(self.shape)))
        return config, make_plan(config, self.model, dtype, device_bytes=self.device_bytes)

    def problems(self) -> list[str]:
        """Why it could not run on the machines that it states; empty when it could."""
        try:
            _, plan = self.plan()
        except ConfigError as error:
            return list(error.problems)
        return plan.problems(self.device_bytes, self.host_bytes)


def read_recipe(path: Path) -> Recipe:
    """A recipe with the machines in the `vime plan` command of its head. Raises: ConfigError if it has no such line."""
    found = _COMMAND.search(path.read_text(encoding="utf-8"))
    words = shlex.split(found[1]) if found else []
    stated = {words[i]: words[i + 1] for i in range(2, len(words) - 1, 2)}
    if found is None or words[1] != f"scripts/{path.name}" or set(stated) != set(_STATED):
        raise ConfigError(
            f'{path}: its head needs a line "#   vime plan --config scripts/{path.name} {" N ".join(_STATED)} N", the '
            "machines that it is for"
        )
    nodes, devices, device_gib, host_gib = (float(stated[flag]) for flag in _STATED)
    return Recipe(
        path, ("--config", str(path)), int(nodes), int(devices), round(device_gib * GIB), round(host_gib * GIB)
    )


def recipes(folder: Path) -> list[Recipe]:
    """All recipes of a folder, small models first."""
    found = [read_recipe(path) for path in folder.glob("*.yaml")]
    return sorted(found, key=lambda recipe: (parameters(recipe.model).total, recipe.name))


def table(folder: Path) -> str:
    """Markdown: one row a recipe, with what the estimate says of it."""
    heads = (
        "recipe",
        "model",
        "trainer",
        "engines",
        "a training GPU holds",
        "engine's part",
        "host of a training node",
    )
    rows = [heads, ("---",) * len(heads), *map(_row, recipes(folder))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(recipe: Recipe) -> tuple[str, ...]:
    config, plan = recipe.plan()
    cluster, fullest = config.cluster, max(plan.devices, key=lambda device: device.total)
    assert cluster.rollout_num_gpus is not None, "resolved"
    each = cluster.rollout_num_gpus_per_engine
    return (
        f"[{recipe.name}](../scripts/{recipe.path.name})",
        recipe.checkpoint,
        _trainer(plan),
        f"{cluster.rollout_num_gpus // each} x {_gpus(each)}, {'the same' if cluster.colocate else 'their own'}",
        f"{fullest.total / GIB:.0f} GiB",
        f"{fullest.parts['engine'] / GIB:.0f} GiB" if cluster.colocate else "",
        f"{plan.host_bytes / GIB:,.0f} GiB",
    )


def _trainer(plan: Plan) -> str:
    d = plan.division
    sizes = {"TP": d.tensor, "PP": d.pipeline, "CP": d.context, "DP": d.data, "EP": d.expert}
    named = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    host = "; optimizer on the host" if plan.training.optimizer_offload_fraction == 1 else ""
    return _gpus(d.world_size) + (f": {named}" if named else "") + host


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
