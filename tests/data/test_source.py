"""Data sources: what every one must keep to, vime's own and the one of docs/data.md."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from vime.config import Config, DataConfig, RolloutConfig
from vime.data.prompt_set import Prompt
from vime.data.sample_json import group_to_json
from vime.data.source import make_buffer, make_own_source, take_groups
from vime.errors import ConfigError, DataError, HookError
from vime.protocols import DataSource
from vime.types import Group, Sample, SampleStatus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
ROLLOUT = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2)


def page_code(words: str) -> str:
    """The one example of docs/data.md that holds these words."""
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if words in b]
    return str(code)


@pytest.fixture
def page_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with the data source and the buffer filter of docs/data.md."""
    code = page_code("def fresh_only") + page_code("(DataSource)").replace("from __future__ import annotations", "")
    (tmp_path / "page_source.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "page_source"
    sys.modules.pop("page_source", None)


@pytest.fixture(params=["buffer", "no prompts", "docs/data.md"])
def make(request: pytest.FixtureRequest) -> Callable[[], DataSource]:
    if request.param == "docs/data.md":
        path = f"{request.getfixturevalue('page_module')}.Sums"
        config = Config(data=DataConfig(data_source_path=path), rollout=ROLLOUT)
        return lambda: make_own_source(config, char_tokenizer())
    prompts = [Prompt(str(i), (i,)) for i in range(3)] if request.param == "buffer" else None
    return lambda: make_buffer(Config(rollout=ROLLOUT, data=DataConfig(rollout_shuffle=True)), prompts)


def contents(groups: list[Group]) -> list[Any]:
    return [group_to_json(group) for group in groups]


def test_ids_are_unique_and_samples_pending(make: Callable[[], DataSource]) -> None:
    source = make()
    groups = [*take_groups(source, 3), *take_groups(source, 4)]
    samples = [sample for group in groups for sample in group.samples]
    assert len({group.group_id for group in groups}) == 7
    assert len({sample.sample_id for sample in samples}) == len(samples) == 14
    assert len({sample.trajectory_id for sample in samples}) == 14
    assert all(s.status is SampleStatus.PENDING and s.response_length == 0 for s in samples)


def test_groups_put_back_come_again_with_their_tokens(make: Callable[[], DataSource]) -> None:
    source = make()
    groups = take_groups(source, 3)
    groups[1].samples[0].append_response([1, 2], [-1.0, -2.0], version=0)
    source.put_back(groups[1:])
    assert contents(take_groups(source, 3)[:2]) == contents(groups[1:])


def test_a_restored_source_goes_on_with_the_same_groups(make: Callable[[], DataSource]) -> None:
    source = make()
    groups = take_groups(source, 5)
    groups[4].samples[1].append_response([1, 2], [-1.0, -2.0], version=0)
    source.put_back([groups[4], groups[2]])
    again = make()
    again.restore(json.loads(json.dumps(source.state())))
    assert contents(take_groups(again, 9)) == contents(take_groups(source, 9))
    assert again.epoch_size() == source.epoch_size()


class Odd(DataSource):
    """A source that answers as it is told."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.answer: Any = config

    def get_groups(self, n: int) -> list[Group]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]

    def put_back(self, groups: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...

    def epoch_size(self) -> int | None:
        return None


def group(i: int) -> Group:
    return Group(i, [Sample(group_id=i, sample_id=i)])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (KeyError("q"), r"Odd\.get_groups\(2\) raised KeyError: 'q' \(test_source.py, line"),
        (None, "returned None; return a list of Group"),
        ([[], []], r"return a list of Group"),
        ([group(0)], "returned 1 groups; a source that comes to its end starts over"),
        ([group(0), Group(1, [])], "returned the group 1 without samples"),
        ([group(0), group(0)], "returned the group id 0 twice"),
        ([group(0), group(-1)], "returned the group id -1 twice, or it is negative"),
    ],
)
def test_a_source_that_answers_nonsense_is_named(answer: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        take_groups(Odd(answer, None), 2)


def test_a_class_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(data=DataConfig(data_source_path=f"{__name__}.Odd"))
    assert isinstance(make_own_source(config, None), Odd)

    def broken(self: Any, config: Any, tokenizer: Any) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(Odd, "__init__", broken)
    with pytest.raises(HookError, match=r"--data-source-path .*\.Odd raised OSError: no disk"):
        make_own_source(config, None)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    prompts = [Prompt("a", (1,)), Prompt("b", (2,))]
    assert make_buffer(Config(rollout=ROLLOUT), prompts).epoch_size() == 2
    with pytest.raises(ConfigError, match=r"--rollout-batch-size is 2, but --prompt-data has 1 prompts .*at most 1"):
        make_buffer(Config(rollout=ROLLOUT), prompts[:1])


def test_the_buffer_filter_of_the_page_prefers_long_responses_and_gives_up_old_ones(page_module: str) -> None:
    config = Config(rollout=ROLLOUT, data=DataConfig(buffer_filter_path=f"{page_module}.fresh_only"))
    source = make_buffer(config, [Prompt(str(i), (i,)) for i in range(9)])
    groups = take_groups(source, 4)
    for group, (length, version) in zip(groups, [(1, 9), (3, 5), (2, 9), (4, 4)], strict=True):
        group.samples[1].append_response([7] * length, [-1.0] * length, version=version)
    source.put_back(groups)
    context: Any = "not read by this filter"
    source.begin_rollout(context, 9)
    assert [group.group_id for group in take_groups(source, 2)] == [1, 2]
    assert source.metrics()["data/num_discarded_groups"] == 1
    assert [group.group_id for group in take_groups(source, 2)] == [0, 4]


def test_a_buffer_over_sorted_prompts_as_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}", "metadata": {"level": -i}}) + "\n" for i in range(3)))
    names: dict[str, Any] = {
        "config": Config(rollout=ROLLOUT, data=DataConfig(prompt_data=[str(path)])),
        "tokenizer": char_tokenizer(),
    }
    exec(page_code("easy_first"), names)
    assert [group.samples[0].prompt for group in take_groups(names["buffer"], 3)] == ["2", "1", "0"]
