"""vime's own flags, generated from the config sections."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from vime.cli.flag import Flag
from vime.config import Config

_KINDS = {int: "int", float: "float", str: "str", bool: "bool"}


def vime_flags() -> dict[str, Flag]:
    """Every setting of `vime.config.sections`, by flag name; `Flag.key` is "section.field"."""
    flags: dict[str, Flag] = {}
    for section, cls in section_classes().items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            name = field.metadata.get("flag", "--" + field.name.replace("_", "-")).removeprefix("--")
            kind, is_list, is_optional = _shape(hints[field.name])
            flags[name] = Flag(
                name=name,
                owner="vime",
                key=f"{section}.{field.name}",
                kind=kind,
                is_list=is_list,
                is_optional=is_optional,
                choices=tuple(field.metadata.get("choices", ())),
                default=_default(field),
                help=field.metadata.get("help", ""),
                group=section,
            )
    return flags


def section_classes() -> dict[str, type[Any]]:
    """Config's own sections in order: name -> dataclass."""
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in dataclasses.fields(Config) if dataclasses.is_dataclass(hints[f.name])}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING, f"setting {field.name} has no default"
    return field.default_factory()


def _shape(hint: Any) -> tuple[str, bool, bool]:
    """A type hint as (kind, is_list, is_optional)."""
    is_optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        is_optional = len(rest) < len(typing.get_args(hint))
        assert len(rest) == 1, f"a setting has one type, not {hint}"
        hint = rest[0]
    if typing.get_origin(hint) is list:
        return _KINDS[typing.get_args(hint)[0]], True, is_optional
    if typing.get_origin(hint) is dict:
        return "weights" if typing.get_args(hint)[1] is float else "json", False, is_optional
    return _KINDS[hint], False, is_optional
