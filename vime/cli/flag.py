"""What a flag is, and how the words after it (or a YAML value) become its value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting as users write it: `--name`, or `name:` in YAML."""

    name: str
    """Without the leading dashes: "rollout-batch-size", "vllm-dtype"."""
    owner: str
    """"vime", "megatron", "vllm" or "router": which part of the Config it goes to."""
    key: str
    """Field name at its owner."""
    kind: str
    """"bool", "int", "float", "str", "json", "weights" (a mapping of names to numbers), or "any": JSON where it parses,
    text otherwise."""
    is_list: bool = False
    """Takes several words of `kind`."""
    is_optional: bool = True
    """None is a value of it ("none" on the command line, null in YAML)."""
    takes_sizes: bool = False
    """Integers may end in k, M, G, T (powers of 1000) or K, m, g, t as vLLM reads them."""
    choices: tuple[Any, ...] = ()
    default: Any = None
    help: str = ""
    group: str = ""
    """Heading it is listed under."""
    value: Any = None
    """For an alias that takes no word (`--no-rope-fusion`): what it sets."""
    refusal: str = ""
    """Not settable here: why, and what to use instead."""

    @property
    def negation(self) -> str:
        """The name that sets a bool to False: "no-colocate"; "save-optim" for "no-save-optim"."""
        return self.name.removeprefix("no-") if self.name.startswith("no-") else f"no-{self.name}"

    def from_words(self, words: Sequence[str]) -> Any:
        """The value of `--name word …`. Raises: ValueError that says what is allowed."""
        if self.is_list:
            if not words:
                raise ValueError(f"needs one or more values ({self.expects})")
            if len(words) == 1 and words[0].lstrip().startswith("["):
                return self.from_yaml(_json(words[0]))
            return [self._one(word) for word in words]
        if self.kind == "weights":
            if len(words) == 1 and words[0].lstrip().startswith("{"):
                return self.from_yaml(_json(words[0]))
            return self._weights([word.rpartition("=")[::2] for word in words])
        if self.kind == "bool":
            if not words:
                return True
            if len(words) == 1 and words[0].lower() in _TRUE | _FALSE:
                return words[0].lower() in _TRUE
            raise ValueError(f"takes no value, got {' '.join(words)!r}; write --{self.name} or --{self.negation}")
        if len(words) != 1:
            got = "none" if not words else f"{len(words)}: {' '.join(words)}"
            raise ValueError(f"needs one value ({self.expects}), got {got}")
        return self._one(words[0])

    def from_yaml(self, value: Any) -> Any:
        """The value of `name: value`, already parsed. Raises: ValueError that says what is allowed."""
        if value is None:
            if not self.is_optional:
                raise ValueError(f"is null, but needs {self.expects}")
            return None
        if self.is_list:
            if isinstance(value, (str, int, float)):
                value = [value]  # as one word on the command line
            if not isinstance(value, list):
                raise ValueError(f"is {value!r}, but needs a list of {self.expects}")
            return [self._one(v if isinstance(v, str) else json.dumps(v)) for v in value]
        if self.kind == "weights":
            if not isinstance(value, dict):
                raise ValueError(f"is {value!r}, but needs a mapping of {self.expects}")
            return self._weights([(str(k), str(w)) for k, w in value.items()])
        if self.kind == "bool" or isinstance(value, bool):
            if self.kind not in ("bool", "json", "any") or not isinstance(value, bool):
                raise ValueError(f"is {value!r}, but needs {self.expects}")
            return value
        if isinstance(value, (list, dict)):
            if self.kind not in ("json", "any"):
                raise ValueError(f"is {value!r}, but needs {self.expects}")
            return value
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"is {value}, which YAML reads as a {type(value).__name__}; put it in quotes")
        return self._one(value if isinstance(value, str) else repr(value))

    def from_switch(self, on: bool) -> Any:
        """What a bool flag sets when given (`on`) or negated: itself, or an alias's own value and its opposite."""
        if self.value is None:
            return on
        if isinstance(self.value, bool):
            return self.value if on else not self.value
        return self.value if on else None

    def as_given(self, value: Any) -> Any:
        """The YAML value that sets the field to `value`: the inverse of `from_switch` for names such as no-x."""
        return not value if self.value is False and isinstance(value, bool) else value

    @property
    def expects(self) -> str:
        """What may be given, in words."""
        if self.choices:
            return "one of " + ", ".join(str(c) for c in self.choices)
        return {
            "bool": "true or false",
            "int": "a whole number",
            "float": "a finite number",
            "str": "text",
            "json": "JSON",
            "weights": "NAME=NUMBER",
            "any": "text or JSON",
        }[self.kind]

    def _weights(self, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
        weights: dict[str, float] = {}
        for name, word in pairs:
            try:
                weight = float(word)
            except ValueError:
                weight = math.nan
            if not name or not math.isfinite(weight):
                raise ValueError(f"holds {f'{name}={word}' if name else word!r}, but needs {self.expects} ...")
            if name in weights:
                raise ValueError(f"names {name} twice; keep one")
            weights[name] = weight
        if not weights:
            raise ValueError(f"needs one or more {self.expects}")
        return weights

    def _one(self, word: str) -> Any:
        if self.is_optional and word.lower() == "none" and word not in self.choices:
            return None
        try:
            value = self._convert(word)
        except (ValueError, OverflowError):
            raise ValueError(f"is {word!r}, but needs {self.expects}") from None
        if self.kind == "int" and not -(2**63) <= value < 2**63:  # nothing that keeps numbers takes larger ones
            raise ValueError(f"is {word!r}, but needs {self.expects} below 2**63")
        if self.choices and value not in self.choices:
            raise ValueError(f"is {word!r}, but needs {self.expects}")
        if value == "" and self.owner == "vime":  # most often a shell variable that was never set
            raise ValueError(f"is empty, but needs {self.expects}; leave it out if it is not wanted")
        return value

    def _convert(self, word: str) -> Any:
        if self.kind == "int":
            size = _SIZE.fullmatch(word) if self.takes_sizes else None
            if size:
                base = 1000 if size[2].islower() else 1024
                return int(float(size[1]) * base ** _POWER[size[2].lower()])
            return int(word)
        if self.kind == "float":
            number = float(word)
            if not math.isfinite(number):
                raise ValueError
            return number
        if self.kind == "json":
            return _json(word)
        if self.kind == "any":
            try:
                return json.loads(word)
            except json.JSONDecodeError:
                return word
        return word


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {text!r} ({error.msg} at character {error.pos})") from None
