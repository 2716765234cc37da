"""The table of hooks: every setting that takes a dotted path is in it, and each row is checked at start."""

from pathlib import Path

import pytest

from vime.cli.vime_flags import vime_flags
from vime.config import Config, DataConfig, RewardConfig, RolloutConfig
from vime.config.hook_table import HOOKS, hook, load, load_all, problems
from vime.errors import ConfigError
from vime.protocols import DataSource

MODULE = """
from vime.protocols import DataSource
def plain(config, *rest, **named): return None
async def awaited(config, *rest, **named): return None
def too_few(): return None
class Source(DataSource):
    def __init__(self, config, tokenizer): pass
    def get_groups(self, n): pass
    def put_back(self, groups): pass
    def state(self): pass
    def restore(self, state): pass
    def epoch_size(self): pass
class Lacking:
    def __init__(self, config, tokenizer): pass
    def get_groups(self): pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"table_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_every_path_of_a_function_is_in_the_table() -> None:
    paths = {flag.key for flag in vime_flags().values() if flag.name.endswith("-path")}
    assert paths | {"reward.rm_parts"} == {row.key for row in HOOKS}


@pytest.mark.parametrize("row", HOOKS, ids=lambda row: row.flag)
def test_each_is_checked_at_start(row, module: str) -> None:
    def config(name: str) -> Config:
        section, field = row.key.split(".")
        value = f"{module}.{name}"
        default = getattr(getattr(Config(), section), field)
        given = [value] if isinstance(default, list) else {value: 1.0} if isinstance(default, dict) else value
        sections = {f: type(getattr(Config(), f)) for f in (section,)}
        return Config(**{section: sections[section](**{field: given})})

    right, wrong = {
        "async": ("awaited", "plain"),
        "function": ("plain", "awaited"),
        "either": ("plain", ""),
        "class": ("Source", "plain"),
    }[row.kind]
    assert not list(problems(config(right)))
    assert load(config(right), row.key) is not None
    kind = "not a class" if row.kind == "class" else "async"
    either = (wrong, kind) if row.kind != "either" else ("too_few", "but is called with")
    for name, words in (either, ("too_few", "but is called with"), ("nothing", "has no nothing")):
        (problem,) = problems(config(name))
        assert problem.startswith(row.flag) and words in problem
        with pytest.raises(ConfigError, match=words):
            load_all(config(name), row.key)


def test_a_group_reward_is_checked_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grouped_reward.py").write_text("async def one(config, sample): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = RewardConfig(custom_rm_path="grouped_reward.two", group_rm=True)
    (problem,) = problems(Config(reward=reward, rollout=RolloutConfig()))
    assert "has no two" in problem


def test_a_data_source_is_checked_method_by_method(module: str) -> None:
    found = list(problems(Config(data=DataConfig(data_source_path=f"{module}.Lacking"))))
    assert "has no method put_back, state, restore, epoch_size, begin_rollout, metrics" in found[0]
    assert "Lacking'.get_groups has parameters (self), but is called with (n)" in found[1]
    optional = {"finished", "dropped"}  # of the run's journal, which is around a source of the user's
    methods = {name for name in vars(DataSource) if not name.startswith("_")} - optional
    assert set(hook("data.data_source_path").methods) == methods
