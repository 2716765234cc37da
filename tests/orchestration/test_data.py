"""Data of a run: what is checked before anything starts, and which source comes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from vime.config import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from vime.config.sections import DebugConfig
from vime.data.buffer import DataBuffer
from vime.errors import ConfigError, DataError
from vime.loop.replay import NoPrompts
from vime.orchestration.data import build_source, check_data, probe_prompts

ROLLOUT = RolloutConfig(rollout_batch_size=1, rollout_max_context_len=4)


def config(folder: Path, train: list[object], held_out: list[object] | None = None) -> Config:
    paths = [folder / "train.jsonl", folder / "held.jsonl"]
    for path, rows in zip(paths, (train, held_out or []), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        data=DataConfig(prompt_data=[str(paths[0])]),
        eval=EvalConfig(eval_prompt_data=["held", str(paths[1])] if held_out is not None else []),
        rollout=ROLLOUT,
    )


def test_training_and_held_out_rows_are_checked_to_the_last(tmp_path: Path) -> None:
    good, bad = {"input": "1"}, {"input": "1", "metadata": {"rm_type": "maths"}}
    rows = check_data(config(tmp_path, [good] * 99, [good] * 99))
    assert rows is not None and len(rows) == 99
    for train, held_out, name in (([*[good] * 99, bad], [good], "train"), ([good], [*[good] * 99, bad], "held")):
        with pytest.raises(DataError, match=rf"{name}\.jsonl: 1 of 100 lines[\s\S]*line 100: metadata.rm_type"):
            check_data(config(tmp_path, train, held_out))


def test_a_batch_larger_than_the_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = replace(config(tmp_path, [{"input": "1"}] * 3), rollout=RolloutConfig(rollout_batch_size=4))
    with pytest.raises(ConfigError, match="--rollout-batch-size is 4, but --prompt-data has 3 prompts"):
        check_data(settings)


def test_the_source_follows_from_the_settings(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    settings = config(tmp_path, [{"input": "12"}, {"input": "12345"}])
    buffer = build_source(settings, check_data(settings), tokenizer)
    assert isinstance(buffer, DataBuffer) and buffer.metrics()["data/num_dropped_prompts"] == 1
    assert build_source(settings, check_data(settings), tokenizer, buffer.state()).state() == buffer.state()
    with pytest.raises(DataError, match="--rollout-seed was 1, and is 42"):
        build_source(settings, check_data(settings), tokenizer, buffer.state() | {"seed": 1})
    assert probe_prompts(buffer, tokenizer, 4) == [tuple(tokenizer("12")["input_ids"])]

    bare = replace(settings, data=DataConfig(disable_rollout_global_dataset=True))
    assert check_data(bare) is None
    empty = build_source(bare, None, tokenizer)
    assert isinstance(empty, DataBuffer) and empty.epoch_size() is None
    assert [len(ids) for ids in probe_prompts(empty, tokenizer, 20)] == [7, 10, 10, 10], (
        "half of the room is for the answer"
    )

    own = replace(settings, data=DataConfig(data_source_path="tests.data.test_source.Odd", prompt_data=["/not/read"]))
    assert check_data(own) is None
    assert type(build_source(own, None, tokenizer)).__name__ == "Odd"

    replay = replace(settings, debug=DebugConfig(load_debug_rollout_data="x"))
    assert check_data(replay) is None
    assert isinstance(build_source(replay, None, tokenizer), NoPrompts)


ROWS = [{"input": "1", "metadata": {"rm_type": "dapo"}}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"reward": RewardConfig(rm_type="dapo", reward_key="accuracy")},
            "the reward gives score, acc, but the key is",
        ),
        ({"reward": RewardConfig(rm_parts={"math": 1.0}, reward_key="score")}, "the reward gives math, total, but"),
        ({"reward": RewardConfig(rm_type="random")}, "line 1: metadata.rm_type is 'dapo', which compares with a label"),
        ({"data": "label"}, "line 1: metadata.rm_type is 'dapo', which gives score, acc, but no key is given"),
    ],
)
def test_a_reward_that_could_not_be_used_is_refused_before_anything_starts(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    settings = config(tmp_path, [{**row, "label": "1"} for row in ROWS])
    if change.get("data"):
        change = {"data": replace(settings.data, label_key=change["data"])}
    with pytest.raises((ConfigError, DataError)) as caught:
        check_data(replace(settings, **change))
    assert problem in str(caught.value)


def test_a_row_may_lack_what_the_users_function_makes(tmp_path: Path) -> None:
    settings = config(tmp_path, ROWS)
    rollout = replace(ROLLOUT, custom_generate_function_path="my.function")
    assert check_data(replace(settings, rollout=rollout, reward=RewardConfig(reward_key="acc"))) is not None


@pytest.mark.parametrize(
    ("entry", "row", "problem"),
    [
        ("rm_type: remote_rm", {}, "held-out set h: rm_type remote_rm asks a server for rewards"),
        ("rm_type: dapo, label_key: a", {}, "held-out set h: rm_type dapo gives score, acc, but no key is given"),
        ("label_key: a", {"rm_type": "remote_rm"}, "line 1: metadata.rm_type is 'remote_rm', which asks a server"),
        ("metadata_overrides: {rm_type: maths}", {}, "held-out set h: metadata_overrides: metadata.rm_type is 'maths'"),
        ("metadata_overrides: {custom_rm_path: no.such}", {}, "metadata_overrides: 'no.such': importing no failed"),
        ("rm_type: math, label_key: a", {"rm_type": "remote_rm"}, None),
        ("rm_type: dapo, label_key: a, reward_key: acc", {}, None),
    ],
)
def test_the_reward_of_a_held_out_set_is_checked_with_its_own_settings(
    tmp_path: Path, entry: str, row: dict[str, str], problem: str | None
) -> None:
    (tmp_path / "h.jsonl").write_text(json.dumps({"input": "1", "a": "1", "metadata": row}) + "\n")
    path = tmp_path / "sets.yaml"
    path.write_text(f"eval: {{datasets: [{{name: h, path: {tmp_path / 'h.jsonl'}, {entry}}}]}}\n")
    settings = replace(config(tmp_path, [{"input": "1"}]), eval=EvalConfig(eval_config=str(path)))
    if problem is None:
        check_data(settings)
        return
    with pytest.raises((ConfigError, DataError)) as caught:
        check_data(settings)
    assert problem in str(caught.value)
