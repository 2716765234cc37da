"""Reading prompts: what is kept, what is refused, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from vime.config import Config, DataConfig, RolloutConfig
from vime.data.prompts import load_prompts, read_prompts
from vime.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return char_tokenizer()


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_prompts_carry_tokens_label_and_metadata(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"q": "1+1=", "a": "2", "metadata": {"level": 1}}, "", {"q": "7", "a": 7})
    prompts = read_prompts(path, tokenizer, input_key="q", label_key="a")
    assert len(prompts) == 2
    assert prompts[0].prompt == "1+1="
    assert tokenizer.decode(prompts[0].tokens) == "1+1="
    assert (prompts[0].label, prompts[0].metadata) == ("2", {"level": 1})
    assert (prompts[1].label, prompts[1].metadata) == (7, {})
    assert prompts.lengths.tolist() == [4, 1]
    assert prompts[-1] == prompts[1]
    assert prompts[:1] == [prompts[0]]
    with pytest.raises(IndexError):
        prompts[2]


def test_chat_messages_and_strings_are_rendered_with_tools_and_arguments(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "p.jsonl", {"input": messages, "tools": [{"name": "f"}]}, {"input": "hi"})
    prompts = read_prompts(path, tokenizer, apply_chat_template=True)
    assert tokenizer.decode(prompts[0].tokens) == "[system]be brief$\n[user]hi$\n[assistant]"
    assert tokenizer.decode(prompts[1].tokens) == "[user]hi$\n[assistant]"
    assert prompts[0].prompt == messages
    assert prompts[0].metadata == {"tools": [{"name": "f"}]}
    bare = read_prompts(
        path, tokenizer, apply_chat_template=True, apply_chat_template_kwargs={"add_generation_prompt": False}
    )
    assert tokenizer.decode(bare[1].tokens) == "[user]hi$\n"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is expected, not a list"),
        ({"inptu": "x", "a": 1}, "no key 'input'; the keys are ['a', 'inptu']"),
        ({"input": "x"}, "no key 'a'"),
        ({"input": "", "a": 1}, "'input' is empty"),
        ({"input": None, "a": 1}, "'input' is null"),
        ({"input": 3, "a": 1}, "'input' is a number"),
        ({"input": [], "a": 1}, "'input' is an empty list"),
        ({"input": [{"content": "x"}], "a": 1}, "'input'[0] is no message"),
        ({"input": [{"role": "user", "content": "x"}], "a": 1}, "needs --apply-chat-template"),
        ({"input": "x", "a": 1, "metadata": [1]}, "'metadata' is a list"),
        ({"input": "x", "a": 1, "tools": {"b": 1}}, "'tools' is an object"),
        ('{"input": "x", "a": NaN}', "NaN is not JSON"),
        ('{"input": "\\ud800", "a": 1}', "surrogate"),
        ("[" * 100000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, tokenizer: Any, line: Any, problem: str) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "ok", "a": 1}, "", line)
    with pytest.raises(DataError) as caught:
        read_prompts(path, tokenizer, label_key="a")
    assert str(path) in str(caught.value)
    assert "1 of 2 lines" in str(caught.value)
    assert "line 3: " in str(caught.value)
    assert problem in str(caught.value)


def test_all_bad_lines_are_counted_and_the_first_shown(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", *["{"] * 7, {"input": "ok"})
    with pytest.raises(DataError, match="7 of 8 lines") as caught:
        read_prompts(path, tokenizer)
    assert "line 5" in str(caught.value)
    assert "line 6" not in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_text_that_is_not_utf8_is_a_bad_line(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "ok"}\n{"input": "\xff"}\n')
    with pytest.raises(DataError, match=r"1 of 2 lines[\s\S]*line 2: not UTF-8"):
        read_prompts(path, tokenizer)


def test_a_template_that_refuses_a_conversation_is_a_bad_line(tmp_path: Path, tokenizer: Any) -> None:
    strict = char_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "p.jsonl", {"input": "x"})
    with pytest.raises(DataError, match="roles must alternate"):
        read_prompts(path, strict, apply_chat_template=True)


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "1234"}, {"input": "12345"}, {"input": "1"})
    prompts = read_prompts(path, tokenizer, max_prompt_len=4)
    assert [p.prompt for p in prompts] == ["1234", "1"]
    assert prompts.num_dropped == 1
    assert "1 of 3 prompts" in caplog.text
    with pytest.raises(DataError, match=r"all 3 prompts are longer .* the shortest has 1"):
        read_prompts(path, tokenizer, max_prompt_len=0)


def test_prompts_that_fill_the_context_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "123"}, {"input": "1234"})
    with pytest.raises(DataError, match=r"1 of 2 prompts leave no room[\s\S]*line 2: 4 tokens"):
        read_prompts(path, tokenizer, max_context_len=4)
    assert len(read_prompts(path, tokenizer, max_context_len=4, max_prompt_len=3)) == 1


def test_missing_and_empty_files_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(write(tmp_path / "e.jsonl", ""), tokenizer)


def test_the_fingerprint_follows_content_and_reading(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "12", "b": "21"}, {"input": "3", "b": "4"})
    first = read_prompts(path, tokenizer).fingerprint()
    assert first == read_prompts(path, tokenizer).fingerprint()
    assert first != read_prompts(path, tokenizer, input_key="b").fingerprint()
    assert first != read_prompts(path, tokenizer, max_prompt_len=1).fingerprint()
    write(path, {"input": "12", "b": "22"}, {"input": "3", "b": "4"})
    assert first != read_prompts(path, tokenizer).fingerprint()


def test_load_prompts_reads_what_the_configuration_says(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"q": "1234", "a": 1}, {"q": "1", "a": 2})
    config = Config(
        data=DataConfig(prompt_data=str(path), input_key="q", label_key="a", rollout_max_prompt_len=3),
        rollout=RolloutConfig(rollout_max_context_len=4),
    )
    assert [(p.prompt, p.label) for p in load_prompts(config, tokenizer)] == [("1", 2)]
    with pytest.raises(DataError, match="no --prompt-data"):
        load_prompts(Config(), tokenizer)
