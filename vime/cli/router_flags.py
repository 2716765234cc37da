"""vllm-router's flags under `--router-`, read from its own arguments."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import types
import typing
from typing import Any

from vime.cli.flag import Flag
from vime.errors import ConfigError

_OWNED = {
    "host": "vime binds the router itself (to 127.0.0.1 on one node)",
    "port": "vime picks a free port",
    "worker_urls": "vime adds the engines it starts",
    "api_key": "vime makes a key for each run; a key here would be added to anonymous calls",
    "api_key_validation_urls": "vime makes a key for each run",
    "mini_lb": "vime starts the router itself",
    "prometheus_host": "vime binds the metrics port where it binds the router",
}
_KINDS = {int: "int", float: "float", str: "str", bool: "bool"}


def router_flags() -> dict[str, Flag]:
    """Every field of vllm_router's RouterArgs, by flag name. Raises: ConfigError when it is not installed."""
    try:
        module = importlib.import_module("vllm_router.router_args")
    except ImportError as error:
        raise ConfigError(f"--router-* flags need vllm-router, which cannot be imported: {error}") from error
    parser = argparse.ArgumentParser(add_help=False)
    module.RouterArgs.add_cli_args(parser, use_router_prefix=True)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    hints = typing.get_type_hints(module.RouterArgs)
    flags = {}
    for field in dataclasses.fields(module.RouterArgs):
        # A field may begin with router_ itself: RouterArgs.router_temperature is --router-temperature.
        name = "router-" + field.name.removeprefix("router_").replace("_", "-")
        action = (
            actions.get(f"--{name}") or actions.get(f"--router-{name}") or actions.get(name.replace("router", "-", 1))
        )
        kind, is_list, is_optional = _shape(hints[field.name])
        flags[name] = Flag(
            name=name,
            owner="router",
            key=field.name,
            kind=kind,
            is_list=is_list,
            is_optional=is_optional,
            choices=tuple(action.choices) if action is not None and action.choices else (),
            default=_default(field),
            help=" ".join((action.help or "").split()) if action is not None else "",
            group="router",
            refusal=_OWNED.get(field.name, ""),
        )
    return flags


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _shape(hint: Any) -> tuple[str, bool, bool]:
    is_optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        is_optional = True
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is list:
        item = typing.get_args(hint)[0]
        return (_KINDS[item], True, is_optional) if item in _KINDS else ("json", False, is_optional)
    return _KINDS.get(hint, "json"), False, is_optional
