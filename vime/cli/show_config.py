"""`vime config`: the resolved configuration, and where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vime.cli.parse import Catalogue
from vime.cli.resolve import DEFAULT, Resolved, as_mapping, resolve
from vime.config.hf import read_model_config


def run(argv: Sequence[str]) -> int:
    """`vime config [--json] [settings]`. Returns: 0; wrong settings are raised as ConfigError."""
    words = [word for word in argv if word != "--json"]
    resolved = resolve(words, fetch=False)
    checkpoint = resolved.config.checkpoint
    if checkpoint.load is not None or checkpoint.save is not None:
        from vime.orchestration.resume import check_load

        check_load(resolved.config, read_model_config(checkpoint.hf_checkpoint))
    if "--json" in argv:
        print(json.dumps({**as_mapping(resolved.config), "model": resolved.shape, "origin": resolved.origin}, indent=2))
    else:
        print(as_yaml(resolved), end="")
    return 0


def as_yaml(resolved: Resolved) -> str:
    """Sections as comments, `name: value  # origin` lines: the settings part is a file that --config takes back."""
    lines: list[str] = []
    catalogue = Catalogue()
    for section, values in as_mapping(resolved.config).items():
        if not values:
            continue
        lines.append(f"# {section}")
        for key, value in values.items():
            name, value = _as_given(catalogue, section, key, value)
            origin = resolved.origin.get(name, "")
            # A default is left out of what --config reads, so that the file stays right when another setting changes.
            lines.append(f"{'# ' if origin == DEFAULT else ''}{name}: {json.dumps(value)}  # {origin}")
        lines.append("")
    lines.append("# model (from the checkpoint; not settings)")
    lines += [f"# {name}: {json.dumps(value)}" for name, value in resolved.shape.items()]
    return "\n".join(lines) + "\n"


def _as_given(catalogue: Catalogue, section: str, key: str, value: Any) -> tuple[str, Any]:
    """The name and value under which a field of a section would be given."""
    owner, field = (section, key) if section in ("megatron", "vllm", "router") else ("vime", f"{section}.{key}")
    flag = next(f for f in catalogue.table(owner).values() if f.key == field and not f.refusal)
    return flag.name, flag.as_given(value)
