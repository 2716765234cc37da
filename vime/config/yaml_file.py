"""A YAML file read strictly: unreadable, malformed and repeated names are the user's to hear of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.errors import ConfigError


def read_yaml(path: str, flag: str) -> Any:
    """The content of a YAML file; None if it is empty.

    Args: flag: the flag that named it, for the errors.
    Raises: ConfigError for a file that cannot be read, is not YAML, or sets a name twice (YAML would keep the last).
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        repeated = list(_repeated_names(yaml.compose(text)))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{flag} {path} is not YAML: {' '.join(str(error).split())}") from error
    if repeated:
        raise ConfigError([f"{flag} {path} {problem}" for problem in repeated])
    return content


def _repeated_names(node: Any) -> Iterator[str]:
    """Names that one mapping sets twice, at any depth. Args: node: of yaml.compose."""
    if node is None or node.id == "scalar":
        return
    if node.id == "sequence":
        for item in node.value:
            yield from _repeated_names(item)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value).replace("_", "-"), key.start_mark.line + 1
        if name in lines:
            yield f"sets {key.value} twice, in lines {lines[name]} and {line}; keep one"
        lines[name] = line
        yield from _repeated_names(value)
