"""Words and YAML files into settings: one grammar for all owners' flags, all problems collected.

    --name value    --name=value    --name a b c    --flag    --no-flag    --config file.yaml

A word that begins with two dashes and a letter is a flag; anything else belongs to the flag before it. Names are never
abbreviated. YAML files hold the same names, flat, with dashes or underscores.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vime.cli.flag import Flag
from vime.cli.megatron_flags import megatron_flags
from vime.cli.router_flags import router_flags
from vime.cli.upstream import what_became_of
from vime.cli.vime_flags import vime_flags
from vime.cli.vllm_flags import vllm_flags
from vime.config.yaml_file import read_yaml
from vime.errors import ConfigError

_SAME_PREFIX = 0.7  # likeness from which on "vlm-" and "vlllm-" are taken for "vllm-"
_IS_FLAG = re.compile(r"--[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Given:
    """One setting the user gave."""

    flag: Flag
    value: Any
    origin: str
    """ "command line" or "--config file.yaml"."""


@dataclass(slots=True)
class Parsed:
    """What was given, by owner and field ("megatron.lr"; the last one wins), and everything wrong with it."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: bool = False
    """A file could not be read, or was given without --config: what it would have set is not missing."""


class Catalogue:
    """All flags by name; each owner's table is read when a name first needs it."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, Flag]] = {}
        self._readers: dict[str, Callable[[], dict[str, Flag]]] = {
            "vime": vime_flags,
            "megatron": megatron_flags,
            "router": router_flags,
            "vllm": vllm_flags,
        }

    def table(self, owner: str) -> dict[str, Flag]:
        """One owner's flags. Raises: ConfigError when its package cannot be read."""
        if owner not in self._tables:
            self._tables[owner] = self._readers[owner]()
        return self._tables[owner]

    def find(self, name: str) -> tuple[Flag, bool] | None:
        """The flag of this exact name, and whether the name is its negation."""
        for owner in self._owners(name):
            table = self.table(owner)
            if name in table:
                return table[name], False
            bare = name.removeprefix("vllm-").removeprefix("router-")
            prefix = name[: len(name) - len(bare)]
            for other in (f"{prefix}{bare.removeprefix('no-')}", f"{prefix}no-{bare}", name.removeprefix("no-")):
                flag = table.get(other)
                if flag is not None and flag.kind == "bool" and other != name:
                    return flag, True
        return None

    def nearest(self, name: str) -> str | None:
        """The known name most like this one, if any is near."""
        owners = self._owners(name)
        if difflib.SequenceMatcher(None, name.split("-")[0], "vllm").ratio() > _SAME_PREFIX:
            owners = ("vime", "vllm")
        names = [n for owner in owners for n in self.table(owner)]
        if "vllm" not in owners:
            names += list(self.table("router"))
        if name.removeprefix("vllm-").removeprefix("router-").startswith("no-"):
            names += [
                f.negation for owner in self._owners(name) for f in self.table(owner).values() if f.kind == "bool"
            ]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        return close[0] if close else None

    def canonical(self, flag: Flag) -> Flag:
        """The name a setting is printed under, where it has several."""
        return next(f for f in self.table(flag.owner).values() if f.key == flag.key and not f.refusal)

    @staticmethod
    def _owners(name: str) -> tuple[str, ...]:
        bare = name.removeprefix("no-")
        if bare.startswith("vllm-"):
            return ("vime", "vllm")
        if bare.startswith("router-"):
            return ("vime", "router")
        return ("vime", "megatron")


def parse(argv: Sequence[str], catalogue: Catalogue) -> Parsed:
    """Read flags and the files of `--config`; never raises for a user's mistake."""
    result = Parsed()
    groups = _split(argv, result)
    for name, words in groups:
        if name != "config":
            continue
        if not words:
            result.problems.append("--config needs the path of a YAML file")
        for path in words:
            _read_yaml(path, catalogue, result)
    for name, words in _joined(groups, catalogue):
        if name != "config":
            _take(name, partial(Flag.from_words, words=words), "command line", f"--{name}", catalogue, result)
    return result


def _joined(groups: Sequence[tuple[str, list[str]]], catalogue: Catalogue) -> list[tuple[str, list[str]]]:
    """A list given several times is one list: `--x a --x b` is `--x a b`. Of any other flag the last counts."""
    joined: list[tuple[str, list[str]]] = []
    at: dict[str, int] = {}
    for name, words in groups:
        if name in at and words and _is_list(name, catalogue):
            joined[at[name]] = (name, joined[at[name]][1] + words)
        else:
            at[name] = len(joined)
            joined.append((name, words))
    return joined


def _is_list(name: str, catalogue: Catalogue) -> bool:
    try:
        found = catalogue.find(name)
    except ConfigError:
        return False  # said when the flag is taken
    return found is not None and found[0].is_list


def _split(argv: Sequence[str], result: Parsed) -> list[tuple[str, list[str]]]:
    """[(flag name, its words)]"""
    groups: list[tuple[str, list[str]]] = []
    closed = False  # --flag=value takes no further words
    for word in argv:
        if _IS_FLAG.match(word):
            name, equals, value = word[2:].partition("=")
            groups.append((name.replace("_", "-"), [value] if equals else []))
            closed = bool(equals)
        elif not groups or closed:
            is_file = word.endswith((".yaml", ".yml"))
            hint = f"did you mean --config {word}?" if is_file else "flags begin with two dashes"
            result.problems.append(f"{word!r} stands alone: no flag before it takes it; {hint}")
            result.unread = result.unread or is_file
        else:
            groups[-1][1].append(word)
    return groups


def _read_yaml(path: str, catalogue: Catalogue, result: Parsed) -> None:
    try:
        content = read_yaml(path, "--config")
    except ConfigError as error:
        result.problems += error.problems
        result.unread = True
        return
    if content is None:
        return
    if not isinstance(content, Mapping):
        result.problems.append(f"--config {path} must hold `name: value` lines, not a {type(content).__name__}")
        return
    for key, value in content.items():
        name = str(key).replace("_", "-")
        where = f"{path}: {key}"
        _take(name, partial(Flag.from_yaml, value=value), f"--config {path}", where, catalogue, result)


def _take(
    name: str, convert: Callable[[Flag], Any], origin: str, where: str, catalogue: Catalogue, result: Parsed
) -> None:
    """Look one name up, convert its value and record it, or record what is wrong."""
    try:
        found = catalogue.find(name)
        suggestion = catalogue.nearest(name) if found is None else None
    except ConfigError as error:
        result.problems += [p for p in error.problems if p not in result.problems]
        return
    if found is None and (fate := what_became_of(name)) is not None:
        result.problems.append(f"{where} {fate}")
        return
    if found is None:
        hint = (
            f"; did you mean --{suggestion}?"
            if suggestion
            else "; see --help, --help-megatron, --help-vllm, --help-router"
        )
        result.problems.append(f"{where} is not a setting{hint}")
        return
    flag, negated = found
    if flag.refusal:
        result.problems.append(f"{where} is not set here: {flag.refusal}")
        return
    try:
        value = convert(flag)
    except ValueError as error:
        result.problems.append(f"{where} {error}")
        return
    if flag.kind == "bool" and value is not None:
        value = flag.from_switch(value != negated)
    result.given[f"{flag.owner}.{flag.key}"] = Given(flag, value, origin)
