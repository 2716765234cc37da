"""The generated pages of docs/: `python -m vime.cli.docs [FOLDER]` writes them, as `make docs` does."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.cli.flag import Flag
from vime.cli.recipes import table as recipe_table
from vime.cli.upstream import read_flags
from vime.cli.vime_flags import section_classes, vime_flags
from vime.config import hook_table
from vime.config.ranges import bounds
from vime.observability.metrics import as_markdown

_COMING_FROM = "coming_from_slime_and_vime.md"
_CUSTOMIZATION = "customization.md"
_BEGIN, _END = "<!-- generated from upstream_flags.yaml: begin -->", "<!-- generated: end -->"
_RECIPES, _BEGIN_RECIPES = "recipes.md", "<!-- generated from scripts/: begin -->"
_BEGIN_HOOKS = "<!-- generated from vime/config/hook_table.py: begin -->"
_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
_INTRODUCTION = """\
# Settings

Generated from `vime/config/sections.py` by `make docs`; change it there.

A setting is given as `--name value` on the command line or as `name: value` in a YAML file (`--config file.yaml`, may be
repeated; the command line wins). A bool is switched by `--name` and `--no-name`; a list takes several words. `none`
(YAML: `null`) gives an optional setting no value. A name that does not exist is refused with the nearest one, and so is a
value that nothing reads as the run is configured; all problems are listed at once, before anything starts.
`vime config` with the flags of a run prints what they resolve to and where each value came from.

Three further owners keep their own names; their tables come from what is installed:

| owner | names | listed by |
|---|---|---|
| megatron-core: parallelism, optimizer, precision | as in Megatron-LM: `--tensor-model-parallel-size`, `--lr`, `--bf16` | `python train.py --help-megatron` |
| vLLM: engines | `--vllm-` before the names of `AsyncEngineArgs`: `--vllm-gpu-memory-utilization` | `python train.py --help-vllm` |
| vllm-router | `--router-` before its own names: `--router-policy` | `python train.py --help-router` |

The model's shape is never set: it is read from the HF checkpoint.
"""  # noqa: E501


def configuration_page() -> str:
    """docs/configuration.md: every setting of vime's own, section by section."""
    classes = section_classes()
    flags = list(vime_flags().values())
    lines = [_INTRODUCTION]
    lines += [f"* [{name}](#{name}): {_summary(cls)}" for name, cls in classes.items()]
    for name, cls in classes.items():
        lines += ["", f"## {name}", "", " ".join((cls.__doc__ or "").split()), ""]
        lines += ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        lines += [_row(flag) for flag in flags if flag.group == name]
    return "\n".join(lines) + "\n"


def upstream_table(flags: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Each of upstream's flags, and what it is here.

    Args: flags: upstream_flags.yaml: heading -> flag -> what is to be said of it.
    """
    ours = vime_flags()
    lines: list[str] = []
    for heading, entries in flags.items():
        lines += ["", f"### {heading}", "", "| there | here | |", "|---|---|---|"]
        for name, said in entries.items():
            if name in ours or said.get("owner"):
                here, note = "same name", said.get("differs", "")
            elif "here" in said:
                here, note = f"`--{said['here']}`", said.get("why", "")
            else:
                here, note = ("not yet" if said.get("later") else "no"), said.get("why", "")
            lines.append(f"| `--{name}` | {here} | {_cell(note)} |")
    return "\n".join(lines).strip() + "\n"


def pages(folder: Path) -> dict[str, str]:
    """Every generated page: name of its file in docs/ -> text.

    Args: folder: docs/, whose pages with a generated part keep the rest.
    """
    return {
        "configuration.md": configuration_page(),
        "metrics.md": as_markdown(),
        _COMING_FROM: _filled(folder / _COMING_FROM, _BEGIN, upstream_table(read_flags())),
        _CUSTOMIZATION: _filled(folder / _CUSTOMIZATION, _BEGIN_HOOKS, hook_table.as_markdown()),
    }


def recipes_page(folder: Path) -> str:
    """docs/recipes.md, whose table takes seconds: every recipe is resolved and its memory estimated."""
    return _filled(folder / _RECIPES, _BEGIN_RECIPES, recipe_table(_SCRIPTS))


def _filled(path: Path, begin: str, table: str) -> str:
    """A page with its generated part as it is now."""
    before, rest = path.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(_END)
    return f"{before}{begin}\n\n{table}\n{_END}{after}"


def main(argv: Sequence[str]) -> int:
    """Write the pages into a folder, docs/ by default. Returns: 0."""
    folder = Path(argv[0]) if argv else Path("docs")
    for name, text in {**pages(folder), _RECIPES: recipes_page(folder)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def _summary(cls: type[Any]) -> str:
    text = " ".join((cls.__doc__ or "").split()).split(". ")[0].rstrip(".")
    return text[:1].lower() + text[1:]


def _row(flag: Flag) -> str:
    return f"| `--{flag.name}` | {_takes(flag)} | {_default(flag)} | {_cell(flag.help)} |"


def _takes(flag: Flag) -> str:
    kind = " or ".join(f"`{choice}`" for choice in flag.choices) or {
        "str": "text",
        "json": "JSON",
        "weights": "NAME=NUMBER, several",
    }.get(flag.kind, flag.kind)
    kind = f"{kind}, several" if flag.is_list else kind
    return f"{kind}, {limits}" if (limits := bounds(flag.key)) else kind


def _default(flag: Flag) -> str:
    if flag.default is None or flag.default in ("", [], {}):
        return ""
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return f"`{flag.default}`"


def _cell(text: str) -> str:
    """Text inside a table's cell; what looks like HTML or a column's end is escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
