"""The settings that a run has left in its folder, as the Config they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.yaml_file import read_yaml
from vime.errors import ConfigError


def read_saved(folder: Path) -> Config:
    """The resolved settings of config.yaml in a run's folder.

    A setting that this vime does not know is left out, and one that the file does not hold has its default, so that
    runs of other versions can be read.

    Raises: ConfigError if there is no such file, or it is not of a run.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no run's folder: it holds no config.yaml; give the folder named by --run-dir")
    content = read_yaml(str(path), "the settings of a run,")
    settings = content.get("settings") if isinstance(content, Mapping) else None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path} holds no settings of a run; give the folder named by --run-dir")
    default = Config()
    sections: dict[str, Any] = {}
    for field in fields(Config):
        values, section = settings.get(field.name), getattr(default, field.name)
        if isinstance(values, Mapping):
            sections[field.name] = _section(section, values) if is_dataclass(section) else dict(values)
    return Config(**sections)


def _section(default: Any, values: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(default)}
    return type(default)(**{name: value for name, value in values.items() if name in known})
