"""How a setting is declared: a dataclass field with a help text, from which its flag and YAML name follow."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(default: Any = dataclasses.MISSING, help: str = "", **extra: Any) -> Any:
    """A field of a config section.

    Args:
        default: the value when nothing is given; a list, dict or tuple is copied. MISSING makes the setting required.
        help: one sentence for `--help` and the docs, with the unit.
        extra: choices=(…) allowed values; flag="--other-name" where the flag is not the field's name.
    """
    metadata = {"help": help, **extra}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
