"""docs/algorithms.md and docs/papers.md: the example works, the table is the code's, files and flags exist."""

import re
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np
import pytest

from tests.loop.test_batch import make, two_groups
from vime.cli.vime_flags import vime_flags
from vime.config import AlgoConfig
from vime.config.estimators import ESTIMATORS, LOSS_AGG_MODES, PG_LOSS_TYPES, Estimator

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
PAPERS = (ROOT / "docs" / "papers.md").read_text("utf-8")


def test_the_example_becomes_an_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    function, row = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    assert len(function.splitlines()) + len(row.splitlines()) <= 20
    module = ModuleType("vime.algo.median")
    exec(function, module.__dict__)
    monkeypatch.setitem(sys.modules, "vime.algo.median", module)
    added = eval("{" + row + "}", {"Estimator": Estimator})
    for place in ("vime.algo.estimate", "vime.loop.learning_signal", "vime.config.estimators"):
        monkeypatch.setattr(f"{place}.ESTIMATORS", MappingProxyType({**ESTIMATORS, **added}))
    batch, _ = make(two_groups(), algo=AlgoConfig(advantage_estimator="median"))
    np.testing.assert_allclose(batch.advantages, [0.5, -0.5, 0, 0])


def test_the_tables_hold_every_choice() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in PAGE.splitlines() if line.startswith("| `")}
    assert {*ESTIMATORS, *LOSS_AGG_MODES, *PG_LOSS_TYPES} <= rows.keys()
    for name, row in ESTIMATORS.items():
        assert row.loss_agg_mode is None or f"| `{row.loss_agg_mode}` |" in rows[name]


@pytest.mark.parametrize("text", [PAGE, PAPERS], ids=["algorithms", "papers"])
def test_flags_and_files_exist(text: str) -> None:
    named = set(re.findall(r"--([a-z]+(?:-[a-z]+)*)(?![-*a-z])", text))
    assert named - vime_flags().keys() <= {"lr"}
    paths = re.findall(r"`((?:vime|tests)/[\w/]+\.py)`", text)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    cases = re.findall(r"cases ([\w, ]+)", text)
    assert all((ROOT / f"tests/golden/cases/{name}.json").exists() for row in cases for name in row.strip().split(", "))


def test_every_estimator_is_in_the_papers() -> None:
    assert [name for name in ESTIMATORS if name not in PAPERS] == []
