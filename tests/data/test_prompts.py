"""Reading prompts: what is kept, what is refused, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from vime.config import Config, DataConfig, RolloutConfig
from vime.config.prompt_files import check_prompt_files
from vime.data.prompt_set import PromptSet
from vime.data.prompts import check_prompts, check_rows, tokenise_prompts
from vime.data.records import RowKeys
from vime.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return char_tokenizer()


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_prompts(
    path: Path,
    tokenizer: Any,
    *,
    apply_chat_template: bool = False,
    apply_chat_template_kwargs: dict[str, Any] | None = None,
    max_prompt_len: int | None = None,
    max_context_len: int | None = None,
    **keys: Any,
) -> PromptSet:
    """The prompts of one file, checked and tokenised."""
    names = {name.removesuffix("_key"): value for name, value in keys.items()}
    rows = check_rows([str(path)], RowKeys(**names, chat=apply_chat_template))
    return rows.tokenise(
        tokenizer,
        chat_kwargs=apply_chat_template_kwargs,
        max_prompt_len=max_prompt_len,
        max_context_len=max_context_len,
    )


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
        ('{"input": "x", "a": 1e999}', "1e999 is beyond what a 64-bit float holds"),
        ('{"input": "\\ud800", "a": 1}', "surrogate"),
        ('{"a": ' + "[" * 100000, "nested too deeply"),
        ('{"input": "x", "a": "\\ud800"}', "'a' holds text with half of a surrogate pair"),
        ('{"input": "x", "a": 1, "metadata": {"\\ud800": [1]}}', "'metadata' holds text with half of a surrogate"),
        ({"input": "x", "a": 1, "metadata": '{"k": ["\\ud800"]}'}, "'metadata' holds text with half of a surrogate"),
        ('{"input": "x", "a": ' + "[" * 101 + "]" * 101 + "}", "'a' is nested more than 100 deep"),
        ({"input": "x", "a": None}, "'a' is null"),
        ('{"input": "x", "input": "y", "a": 1}', "the key 'input' is given twice"),
        ({"input": "x", "a": 1, "metadata": "{"}, "'metadata' is a string that is no JSON"),
        ("{", "each line holds one whole object"),
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


def test_a_json_array_is_told_from_lines(tmp_path: Path, tokenizer: Any) -> None:
    for text in ('[{"input": "a"}]', '[\n  {"input": "a"}\n]\n'):
        path = write(tmp_path / "p.json", text)
        with pytest.raises(DataError, match=r"p\.json begins with a JSON array, but one object a line .* jq -c"):
            read_prompts(path, tokenizer)


def test_messages_written_as_text_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "[1, 2]"}, {"input": json.dumps([{"role": "user", "content": "x"}])})
    with pytest.raises(DataError, match=r"1 of 2 lines[\s\S]*line 2: 'input' is a string that holds messages as JSON"):
        read_prompts(path, tokenizer, apply_chat_template=True)


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "abc"}, {"input": "def"})
    prompts = read_prompts(path, tokenizer)
    write(path, {"input": "abc"}, {"input": "xyz"})
    assert prompts[0].prompt == "abc"
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: the file was changed while the run reads from it"):
        prompts[1]
    checked = check_rows([str(path)], RowKeys())
    write(path, {"input": "abc"}, "{")
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: the file was changed"):
        checked.tokenise(tokenizer)


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
    with pytest.raises(DataError, match=r"none of its 3 prompts can be used: 3 are longer .* the shortest has 1"):
        read_prompts(path, tokenizer, max_prompt_len=0)


def test_prompts_that_fill_the_context_are_dropped_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "12345"}, {"input": "123"}, {"input": "1234"}, {"input": "12"})
    prompts = read_prompts(path, tokenizer, max_context_len=4)
    assert [p.prompt for p in prompts] == ["123", "12"]
    assert [tokenizer.decode(p.tokens) for p in prompts] == ["123", "12"]
    assert (
        "2 of 4 prompts are left out: 2 are without room for a response in --rollout-max-context-len 4" in caplog.text
    )
    both = read_prompts(path, tokenizer, max_context_len=4, max_prompt_len=2)
    assert (both.num_too_long, both.num_over_context, both.num_dropped) == (3, 0, 3)


def test_missing_and_empty_files_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(write(tmp_path / "e.jsonl", ""), tokenizer)


def test_the_fingerprint_follows_content_and_reading(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"input": "12", "b": "21"}, {"input": "3", "b": "4"})
    first = read_prompts(path, tokenizer).fingerprints()
    assert first == read_prompts(path, tokenizer).fingerprints()
    assert first != read_prompts(path, tokenizer, input_key="b").fingerprints()
    assert first != read_prompts(path, tokenizer, max_prompt_len=1).fingerprints()
    write(path, {"input": "12", "b": "22"}, {"input": "3", "b": "4"})
    assert first != read_prompts(path, tokenizer).fingerprints()


def test_the_configuration_says_what_is_read(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"q": "1234", "a": 1}, {"q": "1", "a": 2})
    config = Config(
        data=DataConfig(prompt_data=[str(path)], input_key="q", label_key="a", rollout_max_prompt_len=3),
        rollout=RolloutConfig(rollout_max_context_len=4),
    )
    prompts = tokenise_prompts(config, check_prompts(config, None), tokenizer)
    assert [(p.prompt, p.label) for p in prompts] == [("1", 2)]
    with pytest.raises(DataError, match="no --prompt-data"):
        check_prompts(Config(), None)


def test_several_words_are_read_in_order_and_named_when_bad(tmp_path: Path, tokenizer: Any) -> None:
    a = write(tmp_path / "a.jsonl", {"input": "1"}, {"input": "22"}, {"input": "333"})
    b = write(tmp_path / "b.jsonl", {"input": "4"})
    words = [f"{a}@[1:]", str(b), f"{a}@[:-2]"]
    prompts = check_rows(words, RowKeys()).tokenise(tokenizer)
    assert [p.prompt for p in prompts] == ["22", "333", "4", "1"]
    assert prompts.part_sizes == (2, 1, 1)
    write(a, {"input": "1"}, "{", {"input": 3})
    write(b, "{}")
    with pytest.raises(DataError) as caught:
        check_rows([str(a), str(b)], RowKeys())
    text = str(caught.value)
    assert f"{a}: 2 of 3 lines cannot be used\n  line 2: not JSON" in text, "every file with its rows"
    assert f"{b}: 1 of 1 lines cannot be used\n  line 1: no key 'input'" in text


def test_a_word_of_which_every_prompt_is_too_long_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    a = write(tmp_path / "a.jsonl", {"input": "1"})
    b = write(tmp_path / "b.jsonl", {"input": "333"}, {"input": "22"})
    with pytest.raises(DataError, match=r"b\.jsonl: none of its 2 prompts can be used: 2 are longer"):
        check_rows([str(a), str(b)], RowKeys()).tokenise(tokenizer, max_prompt_len=1)


def test_a_row_has_template_arguments_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    own = {"apply_chat_template_kwargs": {"add_generation_prompt": True}}
    path = write(tmp_path / "p.jsonl", {"input": "a"}, {"input": "a", "metadata": own})
    prompts = read_prompts(
        path, tokenizer, apply_chat_template=True, apply_chat_template_kwargs={"add_generation_prompt": False}
    )
    assert [tokenizer.decode(p.tokens) for p in prompts] == ["[user]a$\n", "[user]a$\n[assistant]"]


async def generate(config: object, sample: object, sampling_params: object) -> object:
    return sample


async def reward(config: object, sample: object) -> float:
    return 1.0


REWARDS = {"math": None, "gsm8k": None, "remote_rm": "asks a server"}


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"rm_type": "remote_rm"}, "metadata.rm_type is 'remote_rm', which asks a server"),
        ({"rm_type": "maths"}, "metadata.rm_type is 'maths'; the built-in rewards are gsm8k, math, remote_rm"),
        ({"rm_type": ["math"]}, "metadata.rm_type is ['math']"),
        ({"apply_chat_template_kwargs": {"a": 1}}, "metadata.apply_chat_template_kwargs needs --apply-chat-template"),
        ({"apply_chat_template_kwargs": 1}, "metadata.apply_chat_template_kwargs is a number"),
        ({"custom_rm_path": 1}, "metadata.custom_rm_path is a number; a dotted path is expected"),
        (
            {"custom_rm_path": "no_such_module.f"},
            "metadata.custom_rm_path 'no_such_module.f': importing no_such_module",
        ),
        ({"generate_function_path": f"{__name__}.reward"}, "but is called with (config, sample, sampling_params)"),
    ],
)
def test_what_a_row_asks_for_itself_is_checked(tmp_path: Path, metadata: dict[str, Any], problem: str) -> None:
    good = {
        "rm_type": "remote_rm",
        "custom_rm_path": f"{__name__}.reward",
        "generate_function_path": f"{__name__}.generate",
    }
    path = write(tmp_path / "p.jsonl", {"input": "a", "metadata": good}, {"input": "a", "metadata": metadata})
    with pytest.raises(DataError, match="1 of 2 lines") as caught:
        check_rows([str(path)], RowKeys(), reward_names=REWARDS)
    assert "line 2: metadata." in str(caught.value)
    assert problem in str(caught.value)
    assert len(check_rows([f"{path}@[:1]"], RowKeys(), reward_names=REWARDS)) == 1


@pytest.mark.parametrize("word", ["x" * 5000, "a\0b", "x" * 5000 + "@[0:1]", "p.jsonl@[" + "9" * 5000 + ":]"])
def test_a_path_that_cannot_be_is_named_in_short(word: str) -> None:
    (problem,) = check_prompt_files("--prompt-data", word, ["input"])
    with pytest.raises(DataError, match="cannot be looked for") as caught:
        check_rows([word], RowKeys())
    assert problem == f"--prompt-data {caught.value}" and len(problem) < 250
