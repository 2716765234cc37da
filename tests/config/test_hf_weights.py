"""Heads and indexes of safetensors: what is read of them, and that no damage gives anything but a ConfigError."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.config.hf_weights import INDEX, SINGLE, StoredTensor, is_buffer, read_head, read_index, read_weights
from vime.errors import ConfigError

HEAD = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
}


def file_of(head: Any, data: int = 14) -> bytes:
    """A safetensors file. Args: head: its text, or what is to become JSON."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def problem_of(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_head(path)
    (problem,) = caught.value.problems
    assert str(path) in problem and "\n" not in problem and len(problem) < 1000
    return problem


def test_a_head_gives_each_tensors_dtype_shape_and_place(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(file_of(HEAD))
    start = 8 + len(json.dumps(HEAD))
    assert list(read_head(path).items()) == [
        ("a", StoredTensor(path, "F32", (2, 1), start, 8)),
        ("b", StoredTensor(path, "BF16", (3,), start + 8, 6)),
    ]
    assert read_weights(tmp_path) == read_head(path)


def test_what_safetensors_itself_writes_is_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"x": torch.ones(2, 3, dtype=torch.float8_e4m3fn), "none": torch.zeros(0, 4), "one": torch.tensor(1.0)}
    save_file(tensors, tmp_path / SINGLE)
    assert {n: (t.dtype, t.shape) for n, t in read_weights(tmp_path).items()} == {
        "x": ("F8_E4M3", (2, 3)),
        "none": ("F32", (0, 4)),
        "one": ("F32", ()),
    }


def changed(name: str, **values: Any) -> bytes:
    return file_of({**HEAD, name: {**HEAD[name], **values}})


def without(key: str) -> bytes:
    return file_of({**HEAD, "a": {k: v for k, v in HEAD["a"].items() if k != key}})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has 0 bytes"),
        (file_of(HEAD)[:7], "it has 7 bytes"),
        (file_of(HEAD)[:50], "is no safetensors file, or is cut off"),
        (file_of(HEAD)[:-1], "is cut off: it has"),
        (file_of(HEAD, 15), "has bytes behind its last tensor"),
        (b"\xff" * 64, "a head of 18446744073709551615"),
        (struct.pack("<Q", 0), "its head begins with b''"),
        (file_of(b"abcd"), "its head begins with b'abcd'"),
        (file_of([]), "its head begins with b'[]'"),
        (file_of(b"{\xff\xfe}"), "can't decode byte 0xff"),
        (file_of('{"a": 1}'.encode("utf-16-le")), "is damaged"),
        (file_of(b'{"a":' + b"[" * 200_000), "is damaged: maximum recursion depth"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "is damaged: Exceeds the limit"),
        (file_of(b'{"a": 1, "a": 2}'), "a comes twice"),
        (file_of(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "dtype comes twice"),
        (file_of({**HEAD, "__metadata__": []}), "__metadata__ is []"),
        (file_of({**HEAD, "__metadata__": {"x": 1}}), "__metadata__ is {'x': 1}"),
        (file_of({**HEAD, "a": None}), "a: its entry is None, not an object"),
        (file_of({**HEAD, "a": [1]}), "a: its entry is [1]"),
        (without("dtype"), "its dtype is None"),
        (without("shape"), "its shape is None"),
        (without("data_offsets"), "its data_offsets are None"),
        (changed("a", dtype="F33"), "its dtype is 'F33', not one of F4, "),
        (changed("a", dtype=["F32"]), "its dtype is ['F32']"),
        (changed("a", shape="2"), "its shape is '2'"),
        (changed("a", shape=[2.0]), "its shape is [2.0]"),
        (changed("a", shape=[True, 2]), "its shape is [True, 2]"),
        (changed("a", shape=[-2, -1]), "its shape is [-2, -1]"),
        (changed("a", shape=[2**70]), "its shape is [1180591620717411303424]"),
        (changed("a", shape=[1] * 100), "its shape is [1, 1"),
        (changed("a", shape=[2**62] * 16), "its data_offsets are [0, 8], but F32 of shape"),
        (changed("a", shape=[3]), "its data_offsets are [0, 8], but F32 of shape [3] takes 12 bytes"),
        (changed("a", data_offsets=[0]), "its data_offsets are [0]"),
        (changed("a", data_offsets=[0.0, 8.0]), "its data_offsets are [0.0, 8.0]"),
        (changed("a", data_offsets=[-8, 0]), "its data_offsets are [-8, 0]"),
        (changed("a", data_offsets=[8, 0]), "its data_offsets are [8, 0]"),
        (changed("b", data_offsets=[4, 10]), "b begins at byte"),
        (changed("b", data_offsets=[9, 15]), "leaves a hole before it"),
        (changed("b", data_offsets=[2**80, 2**80 + 6]), "leaves a hole before it"),
        (file_of({"x\ny" * 200: 1}), "'x\\ny"),
    ],
)
def test_a_damaged_head_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in problem_of(tmp_path / SINGLE, content)


def test_no_damaged_byte_gives_another_error(tmp_path: Path) -> None:
    """Every byte of the head, changed in several ways, and every length."""
    whole, path = file_of(HEAD), tmp_path / SINGLE
    damaged = [whole[:n] for n in range(len(whole))]
    for at in range(len(whole) - 14):
        damaged += [whole[:at] + bytes([b]) + whole[at + 1 :] for b in (0, 0xFF, whole[at] ^ 1, ord('"'), ord("["))]
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read_head(path)
        except ConfigError:
            refused += 1
    assert refused > 0.8 * len(damaged)  # a changed letter of a name is none of the file's business


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["F32", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PLACES = st.sampled_from([(), ("a",), ("__metadata__",), *((("a"), k) for k in ("dtype", "shape", "data_offsets"))])


@given(place=PLACES, value=JSON)
def test_a_value_of_any_kind_at_any_place_of_a_head_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str, ...], value: Any
) -> None:
    head: Any = json.loads(json.dumps(HEAD))
    if place:
        inner = head
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(file_of(head if place else value))
    try:
        assert all(isinstance(t, StoredTensor) for t in read_head(path).values())
    except ConfigError:
        pass


def folder_of(folder: Path, where: Any, **files: dict[str, Any]) -> Path:
    (folder / INDEX).write_text(where if isinstance(where, str) else json.dumps(where))
    for name, head in files.items():
        size = max((e["data_offsets"][1] for e in head.values()), default=0)
        (folder / f"{name}.safetensors").write_bytes(file_of(head, size))
    return folder


ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
X = {"x": "1.safetensors"}


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    both = {"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}, "metadata": {"total_size": 2}}
    folder = folder_of(tmp_path, both, **{"1": {"x": ONE}, "2": {"y": ONE}})
    assert {name: t.file.name for name, t in read_weights(folder).items()} == both["weight_map"]
    folder_of(tmp_path, both, **{"1": {"z": ONE}})
    with pytest.raises(ConfigError) as caught:
        read_weights(folder)
    lacks, holds = caught.value.problems
    assert "1.safetensors lacks 1 tensor (x) that" in lacks
    assert "1.safetensors holds 1 tensor (z) that" in holds
    (tmp_path / SINGLE).write_bytes(file_of(HEAD))
    folder_of(tmp_path, both, **{"1": {"x": ONE}})
    with pytest.raises(ConfigError, match="which does not name it; transformers would read the first, vLLM the second"):
        read_weights(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("", "is damaged"),
        ("x", "is damaged"),
        ("[]", r"holds \[\], not an object"),
        ("{}", "its weight_map is None"),
        ({"weight_map": [1]}, r"its weight_map is \[1\]"),
        ({"weight_map": {}}, r"its weight_map is \{\}"),
        ({"weight_map": {"x": 1}}, "the file of x is 1, not a name"),
        ({"weight_map": {"x": None}}, "the file of x is None"),
        ('{"weight_map": {"x": "1.safetensors", "x": "1.safetensors"}}', "x comes twice"),
        ({"weight_map": {"x": "/etc/1.safetensors"}}, "must be a file of its own folder"),
        ({"weight_map": {"x": "../1.safetensors"}}, "must be a file of its own folder"),
        ({"weight_map": {"x": "a\0.safetensors"}}, "must be a file of its own folder"),
        ('{"weight_map": {"x": "\\ud800.safetensors"}}', "must be a file of its own folder"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "ends in .safetensors"),
        ({"weight_map": {"x": "9.safetensors"}}, "holds no 9.safetensors"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_weights(folder_of(tmp_path, index, **{"1": {"x": ONE}}))
    assert all("\n" not in problem for problem in caught.value.problems)


def test_an_index_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="decode byte 0xff"):
        read_index(tmp_path / INDEX)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.symlink_to(path.name), "it is a link that leads nowhere"),
        (lambda path: path.symlink_to("nowhere"), "it is a link that leads nowhere"),
        (lambda path: os.mkfifo(path), "it is no plain file"),
    ],
)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} cannot be read: {words}"):
        read_weights(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_of(HEAD))
    (tmp_path / SINGLE).chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_weights(tmp_path)


def test_files_that_no_index_speaks_of_are_refused_where_engines_would_load_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        read_weights(tmp_path)
    (tmp_path / SINGLE).write_bytes(file_of(HEAD))
    (tmp_path / "adapter.safetensors").write_bytes(file_of(HEAD))
    with pytest.raises(ConfigError, match=r"holds adapter.safetensors beside model.safetensors, and no .*index"):
        read_weights(tmp_path)


def test_rotary_buffers_are_told_by_name() -> None:
    for name in ("model.rotary_emb.inv_freq", "model.layers.11.self_attn.rotary_emb.cos_cached"):
        assert is_buffer(name)
    for name in ("rotary_emb.inv_freq", "model.layers.x.self_attn.rotary_emb.inv_freq", "model.rotary_emb.weight"):
        assert not is_buffer(name)


def test_heads_of_a_large_mixture_are_read_at_once(tmp_path: Path) -> None:
    """18,867 tensors, as Qwen3-30B-A3B has; about 0.2 s of work, and not minutes of quadratic search."""
    names = [f"model.layers.{i}.mlp.experts.{e}.{x}" for i in range(48) for e in range(128) for x in "abc"]
    head = {n: {"dtype": "U8", "shape": [1, 1], "data_offsets": [k, k + 1]} for k, n in enumerate(names)}
    (tmp_path / SINGLE).write_bytes(file_of(head, len(names)))
    begin = time.process_time()
    assert len(read_weights(tmp_path)) == len(names)
    assert time.process_time() - begin < 10
