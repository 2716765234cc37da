"""What is read from megatron-core's source agrees with its dataclasses as Python sees them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from vime.cli.megatron_flags import (
    ALIASES,
    CHECKPOINT_ONLY,
    SOURCES,
    TRAINER_ONLY,
    UNKNOWN,
    megatron_fields,
    megatron_flags,
)
from vime.cli.vime_flags import vime_flags

# Runs in a process of its own: importing megatron-core here would come before the trainer tests' own preparations.
_DESCRIBE = """
import dataclasses, importlib, json, sys, types, typing
PLAIN = (bool, int, float, str, list, type(None))
described = {}
for module, name in json.loads(sys.argv[1]):
    cls = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(cls)
    fields = described[name] = {}
    for f in dataclasses.fields(cls):
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        hint, optional = hints[f.name], False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            rest = [a for a in typing.get_args(hint) if a is not type(None)]
            hint = rest[0] if len(rest) == 1 else typing.Union
        literal = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
        fields[f.name] = {
            "plain": type(value) in PLAIN,
            "default": value if type(value) in PLAIN else None,
            "type": hint.__name__ if hint in (int, float, str, bool) else None,
            "literal": literal,
        }
print("DESCRIBED " + json.dumps(described))
"""


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, Any]]:
    """class -> field -> what Python says of it."""
    modules = [("megatron.core." + path.removesuffix(".py").replace("/", "."), name) for path, name in SOURCES]
    command = [sys.executable, "-W", "ignore", "-c", _DESCRIBE, json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    described: dict[str, dict[str, Any]] = json.loads(done.stdout.partition("DESCRIBED ")[2])
    return described


def test_every_field_of_every_dataclass_is_read(real: dict[str, dict[str, Any]]) -> None:
    read: dict[str, set[str]] = {name: set() for _, name in SOURCES}
    for field in megatron_fields():
        read[field.config].add(field.name)
    read["TransformerConfig"] |= read["ModelParallelConfig"]  # inherited
    assert read == {name: set(fields) for name, fields in real.items()}


def test_defaults_agree(real: dict[str, dict[str, Any]]) -> None:
    for field in megatron_fields():
        python = real[field.config][field.name]
        assert python["plain"] == (field.default is not UNKNOWN), field
        if python["plain"]:
            assert field.default == python["default"], field


def test_types_agree(real: dict[str, dict[str, Any]]) -> None:
    usable = [flag for flag in megatron_flags().values() if not flag.refusal and flag.group in real]
    checked = 0
    for flag in {flag.key: flag for flag in reversed(usable)}.values():  # aliases come after the field's own flag
        python = real[flag.group][flag.key]
        if python["literal"] is not None:
            assert list(flag.choices) == python["literal"], flag
        elif python["type"] is not None:
            assert (flag.kind, flag.is_list, flag.choices) == (python["type"], False, ()), flag
        else:
            assert flag.is_list or flag.kind in ("json", "any"), flag
        checked += 1
    assert checked > 250


def test_what_text_cannot_express_is_no_flag() -> None:
    keys = {flag.key for flag in megatron_flags().values()}
    left_out = {field.name for field in megatron_fields()} - keys
    assert {"params_dtype", "activation_func", "init_method", "no_sync_func", "timers"} <= left_out
    assert len(left_out) < 25


def test_aliases_name_real_fields(real: dict[str, dict[str, Any]]) -> None:
    fields = {name: python for cls in real.values() for name, python in cls.items()}
    flags = megatron_flags()
    for name, (field, value) in ALIASES.items():
        assert field in fields and flags[name].key == field
        if isinstance(value, bool):
            assert fields[field]["type"] == "bool"


def test_megatron_core_s_own_notes_of_the_spelling_are_used() -> None:
    flags = megatron_flags()
    assert flags["norm-epsilon"].key == "layernorm_epsilon"
    assert flags["apply-layernorm-1p"].key == "layernorm_zero_centered_gamma"
    assert flags["disable-bias-linear"].key == "add_bias_linear" and flags["disable-bias-linear"].value is False
    assert flags["fp8-format"].key == "fp8"
    assert flags["layernorm-epsilon"].refusal == "Megatron-LM calls it --norm-epsilon"


def test_names_of_megatron_training_are_no_fields_of_megatron_core(real: dict[str, dict[str, Any]]) -> None:
    fields = {name for cls in real.values() for name in cls}
    assert not {key for key, *_ in CHECKPOINT_ONLY.values()} & fields


def test_what_only_the_trainer_reads_is_no_field_of_megatron_core(real: dict[str, dict[str, Any]]) -> None:
    assert not {key for key, *_ in TRAINER_ONLY.values()} & {name for cls in real.values() for name in cls}


def test_settings_of_vime_are_not_doubled() -> None:
    assert not set(megatron_flags()) & set(vime_flags())


def test_reading_the_flags_imports_neither_megatron_nor_torch() -> None:
    code = (
        "import sys; from vime.cli.megatron_flags import megatron_flags; assert len(megatron_flags()) > 280;"
        "print([m for m in ('torch', 'megatron.core', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
