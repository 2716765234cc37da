"""examples/gsm8k and examples/dapo_math: files as the hub has them become prompts that a run reads and grades."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import hub_files
from examples.dapo_math import prepare_data as dapo
from examples.gsm8k import prepare_data as gsm8k
from vime.rewards import dapo as dapo_reward
from vime.rewards import gsm8k as gsm8k_reward
from vime.rewards import math as math_reward

GSM8K = [
    {
        "question": "Tom has 1,000 pens and buys 200. How many?",
        "answer": "1000 + 200 = <<1000+200=1200>>1200\n#### 1,200",
    },
    {"question": "It was 5 degrees and fell by 8. What is it now?", "answer": "5 - 8 = -3\n#### -3"},
]
BEFORE, AFTER = "Work on it. The last line is Answer: $Answer, as agreed.", 'Mind the line of "Answer:".'


def dapo_row(text: str, answer: str, index: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{BEFORE}\n\n{text}\n\n{AFTER}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


DAPO = [dapo_row("What is $1 + 1$?", "2", "a"), dapo_row("One paragraph.\n\nAnd $x = 7$.", "7", "b")] * 3


def file_of(folder: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"source.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_gsm8k_has_the_number_as_label_and_asks_for_the_line_that_its_reward_reads(tmp_path: Path, kind: str) -> None:
    source = str(file_of(tmp_path, GSM8K, kind))
    assert gsm8k.main(["--out", str(tmp_path / "out"), "--train", source, "--test", source]) == 0
    written = lines(tmp_path / "out/train.jsonl")
    assert written == lines(tmp_path / "out/test.jsonl")
    assert [row["label"] for row in written] == ["1,200", "-3"]
    assert (
        written[0]["input"][0]["content"].startswith(GSM8K[0]["question"])
        and "####" in written[0]["input"][0]["content"]
    )
    assert [gsm8k_reward.grade("... so\n#### 1200", row["label"], {}).score for row in written] == [1.0, 0.0]


@pytest.mark.parametrize("answer", ["42", "#### none", "#### "])
def test_an_answer_that_nobody_could_get_right_is_named(tmp_path: Path, answer: str, capsys: Any) -> None:
    source = str(file_of(tmp_path, [*GSM8K, {"question": "?", "answer": answer}], "jsonl"))
    assert gsm8k.main(["--out", str(tmp_path / "out"), "--train", source, "--test", source]) == 1
    assert "row 2: the answer ends in no #### and number" in capsys.readouterr().err
    assert not (tmp_path / "out/train.jsonl").exists()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_dapo_math_has_each_problem_once_with_the_datas_own_instruction(tmp_path: Path, kind: str) -> None:
    source = str(file_of(tmp_path, DAPO, kind))
    assert dapo.main(["--out", str(tmp_path / "out"), "--train", source, "--aime", source]) == 0
    written = lines(tmp_path / "out/train.jsonl")
    assert written == lines(tmp_path / "out/aime-2024.jsonl")
    assert [(row["label"], row["metadata"]) for row in written] == [("2", {"index": "a"}), ("7", {"index": "b"})]
    assert [row["input"] for row in written] == [row["prompt"] for row in DAPO[:2]]
    assert dapo_reward.quick_grade("thus\nAnswer: 2", written[0]["label"], {}) == dapo_reward.grade(
        "Answer: $2$", "2", {}
    )


def test_dapo_math_may_ask_for_a_box_instead(tmp_path: Path) -> None:
    source = str(file_of(tmp_path, DAPO, "parquet"))
    words = ["--out", str(tmp_path / "out"), "--answer", "boxed", "--train", source, "--aime", source]
    assert dapo.main(words) == 0
    content = lines(tmp_path / "out/train.jsonl")[1]["input"][0]["content"]
    assert content.startswith("One paragraph.\n\nAnd $x = 7$.\n\n") and content.endswith("\\boxed{}.")
    assert "Answer:" not in content
    graded = math_reward.quick_grade("\\boxed{7}", "7", {})
    assert graded is not None and graded.score == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dapo_row("New", "", "c"), "the answer is empty"),
        (
            {**DAPO[0], "prompt": [{"role": "system", "content": "x"}, *DAPO[0]["prompt"]]},
            "not one message of the user's",
        ),
    ],
)
def test_dapo_rows_that_are_not_what_they_should_be_are_named(
    tmp_path: Path, row: dict[str, Any], message: str, capsys: Any
) -> None:
    source = str(file_of(tmp_path, [*DAPO, row], "jsonl"))
    assert dapo.main(["--out", str(tmp_path / "out"), "--train", source, "--aime", source]) == 1
    assert message in capsys.readouterr().err


def test_a_problem_with_two_answers_is_left_out_and_counted(tmp_path: Path) -> None:
    source = file_of(tmp_path, [*DAPO, dapo_row("What is $1 + 1$?", "3", "a")], "parquet")
    prompts, doubtful = dapo.rows(source, boxed=False)
    assert ([row["label"] for row in prompts], doubtful) == (["7"], 1)


def test_files_that_are_not_the_data_are_named(tmp_path: Path) -> None:
    other = file_of(tmp_path, [{"problem": "x"}], "parquet")
    with pytest.raises(hub_files.BadData, match="has no question, answer; it has problem"):
        list(gsm8k.rows(other))
    other.write_bytes(b"PAR1 nothing")
    with pytest.raises(hub_files.BadData, match="not a Parquet file that can be read"):
        list(gsm8k.rows(other))
    with pytest.raises(hub_files.BadData, match="is not a file"):
        list(gsm8k.rows(tmp_path / "missing.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"question": 1\n')
    with pytest.raises(hub_files.BadData, match=r"bad\.jsonl:1 is not JSON"):
        list(gsm8k.rows(tmp_path / "bad.jsonl"))


def test_a_hub_that_does_not_answer_is_named_with_the_way_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only_cached = []

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route")

    def not_cached(*args: Any, local_files_only: bool, **kwargs: Any) -> None:
        only_cached.append(local_files_only)
        raise OSError("not in the cache")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuses)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", not_cached)
    with pytest.raises(
        hub_files.BadData, match=r"give main/x of the data set openai/gsm8k \(OSError: no route\).* by --train$"
    ):
        hub_files.hub_file("openai/gsm8k", "main/x", "--train")
    assert only_cached == [True], "the client's download would try for half a minute"
