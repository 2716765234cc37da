"""What is said of a row that cannot be used."""

from __future__ import annotations

from typing import Any


class BadRow(Exception):
    """Why one row cannot be used."""


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
