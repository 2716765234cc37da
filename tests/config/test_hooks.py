"""Users' functions are found and checked before anything starts."""

import sys
from pathlib import Path

import pytest

from vime.config.hooks import load_hook
from vime.errors import ConfigError

MODULE = """
class Thing:
    async def __call__(self, config, sample):
        return 1.0

thing = Thing()
number = 3

async def reward(config, sample):
    return 1.0

async def reward_with_more(args, sample, extra=None, **kwargs):
    return 1.0

def not_async(config, sample):
    return 1.0

def rollout(config, rollout_id, data_source, engines, evaluation=False):
    return None

def one(config):
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"hooks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('no')")
    (tmp_path / f"{name}_exits.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


@pytest.mark.parametrize("name", ["reward", "reward_with_more", "thing"])
def test_a_fitting_function_is_given_back(module: str, name: str) -> None:
    assert callable(load_hook(f"{module}.{name}", ("config", "sample"), is_async=True))


def test_keyword_arguments_are_checked(module: str) -> None:
    parameters = ("config", "rollout_id", "data_source", "engines")
    load_hook(f"{module}.rollout", parameters, keywords=("evaluation",))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'evaluate'"):
        load_hook(f"{module}.rollout", parameters, keywords=("evaluate",))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no missing"),
        ("number", "is a int, not a function"),
        ("one", r"has parameters \(config\), but is called with \(config, sample\)"),
        ("not_async", "must be an `async def`"),
    ],
)
def test_a_wrong_function_is_named_with_what_is_wrong(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_hook(f"{module}.{name}", ("config", "sample"), is_async=True)


def test_a_module_that_cannot_be_imported_says_why(module: str) -> None:
    with pytest.raises(ConfigError, match="RuntimeError: no"):
        load_hook(f"{module}_broken.reward", ("config", "sample"))
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        load_hook(f"{module}_exits.reward", ("config", "sample"))
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError.*PYTHONPATH"):
        load_hook("no_such_module_here.reward", ("config", "sample"))
    with pytest.raises(ConfigError, match="not a dotted path"):
        load_hook("reward", ("config", "sample"))
