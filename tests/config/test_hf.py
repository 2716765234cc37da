"""Where a checkpoint is, and what is said when it is nowhere."""

import contextlib
import json
from pathlib import Path

import pytest

from vime.config.hf import load_tokenizer, local_checkpoint, read_model_config, token_problem, tokenizer_problem
from vime.errors import ConfigError


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # An address where nothing answers, read when huggingface_hub is imported; and an empty cache.
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_folder_is_read_without_the_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert read_model_config(str(tmp_path)) == {"model_type": "qwen3"}
    assert local_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_config_that_is_no_json_object_is_a_problem(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(str(tmp_path))


def test_a_folder_without_config_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "a/b/c", "../up"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_name(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder, and it is no hub name"):
        read_model_config(name)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        local_checkpoint(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("read", [read_model_config, local_checkpoint])
def test_a_hub_name_that_cannot_be_fetched_says_so(read: object) -> None:
    with pytest.raises(ConfigError, match="owner/name: there is no such folder here, the hub did not give"):
        read("owner/name")  # type: ignore[operator]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    from tests.fakes import char_tokenizer

    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text('{"x')
    with pytest.raises(ConfigError, match=f"{tmp_path}: its tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)
    assert name.startswith("tokenizer_config") or "its tokenizer is damaged: " in str(tokenizer_problem(tmp_path))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    from tests.fakes import char_tokenizer

    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: ...\n")
    settings = tmp_path / "tokenizer_config.json"
    told = json.loads(settings.read_text())
    assert load_tokenizer(tmp_path)("ab")["input_ids"]
    settings.write_text(json.dumps(told | {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}))
    with contextlib.suppress(ConfigError):  # or transformers' own class is used
        load_tokenizer(tmp_path)
    own = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    settings.write_text(json.dumps(told | own))
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    with pytest.raises(ConfigError, match="code of its own"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def tokenizer(folder: Path, vocab: object, added: object = ()) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": list(added)}))
    return folder


def test_checkpoints_must_mean_the_same_tokens_by_the_same_ids(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "ours", {"a": 0, "b": 1}, [{"content": "<end>", "id": 2}])
    more = tokenizer(tmp_path / "more", {"a": 0, "b": 1, "<end>": 2, "c": 3})
    pairs = tokenizer(tmp_path / "pairs", [["a", -1.0], ["b", -2.0]])
    swapped = tokenizer(tmp_path / "swapped", {"b": 0, "a": 1}, [{"content": "<end>", "id": 2}])
    another = tokenizer(tmp_path / "another", {"a": 0, "b": 1, "<stop>": 2})
    for same in (ours, more, pairs, tmp_path):
        assert token_problem(same, ours, flag="--x") is None
    assert "2 tokens of the policy's have other ids there, such as 0, which is 'a'" in str(
        token_problem(swapped, ours, flag="--x")
    )
    assert "such as 2, which is '<end>'" in str(token_problem(another, ours, flag="--x"))
