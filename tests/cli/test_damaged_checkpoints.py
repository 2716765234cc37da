"""Checkpoints damaged in every way we could think of: one line for each problem, exit code 2, and never a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vime.cli.convert import convert
from vime.cli.main import main
from vime.cli.resolve import resolve
from vime.config.hf_weights import INDEX, SINGLE
from vime.errors import ConfigError

EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
Damage = Callable[[Path], object]


@pytest.fixture
def damaged(tiny_qwen3_moe: Path, tmp_path: Path) -> Callable[[Damage], Path]:
    """A function that copies a whole checkpoint of a mixture of experts and damages the copy."""

    def make(damage: Damage) -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(tiny_qwen3_moe, folder)
        damage(folder)
        return folder

    return make


def head(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the head of the weights' file, and not the bytes behind it."""

    def damage(folder: Path) -> None:
        path = folder / SINGLE
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def raw(change: Callable[[bytes], bytes], name: str = SINGLE) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """A sound file of other tensors."""

    def damage(folder: Path) -> None:
        found = load_file(folder / SINGLE)
        change(found)
        save_file(found, folder / SINGLE, metadata={"format": "pt"})

    return damage


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    """An index. Args: change: from what would be right to the index's contents."""

    def damage(folder: Path) -> None:
        where = dict.fromkeys(load_file(folder / SINGLE), SINGLE)
        content = change(where)
        (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))

    return damage


def config(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def replaced(name: str, make: Damage) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


OF_WEIGHTS: dict[str, Damage] = {
    "no bytes": raw(lambda b: b""),
    "five bytes": raw(lambda b: b[:5]),
    "cut in the head": raw(lambda b: b[:100]),
    "cut in the data": raw(lambda b: b[:-7]),
    "bytes too many": raw(lambda b: b + b"\0"),
    "huge head": raw(lambda b: b"\xff" * 8 + b[8:]),
    "head of text": raw(lambda b: struct.pack("<Q", 4) + b"abcd"),
    "head is a list": raw(lambda b: struct.pack("<Q", 2) + b"[]"),
    "head is not UTF-8": raw(lambda b: struct.pack("<Q", 5) + b"{\xff\xfe\xfd}"),
    "head is deep": raw(lambda b: struct.pack("<Q", 200_005) + b'{"a":' + b"[" * 200_000),
    "entry is null": head(lambda h: h.update({EXPERT: None})),
    "entry without dtype": head(lambda h: h[EXPERT].pop("dtype")),
    "entry without offsets": head(lambda h: h[EXPERT].pop("data_offsets")),
    "unknown dtype": head(lambda h: h[EXPERT].update(dtype="F8_X")),
    "another dtype of as many bytes": head(lambda h: h[EXPERT].update(dtype="I32")),
    "negative offsets": head(lambda h: h[EXPERT].update(data_offsets=[-8, 0])),
    "overlapping offsets": head(lambda h: h[EXPERT].update(data_offsets=h[ROUTER]["data_offsets"])),
    "offsets beyond the end": head(lambda h: h[EXPERT].update(data_offsets=[2**40, 2**40 + 64 * 64 * 4])),
    "negative shape": head(lambda h: h[EXPERT].update(shape=[-64, -64])),
    "shape is text": head(lambda h: h[EXPERT].update(shape="x")),
    "a shape of as many numbers": head(lambda h: h[EXPERT].update(shape=[32, 128])),
    "names swapped": head(lambda h: h.update({EXPERT: h[ROUTER], ROUTER: h[EXPERT]})),
    "missing tensor": tensors(lambda t: t.pop(EXPERT)),
    "missing head": tensors(lambda t: t.pop("lm_head.weight")),
    "unexpected tensor": tensors(lambda t: t.update({"score.weight": torch.zeros(1, 64)})),
    "one expert too many": tensors(lambda t: t.update({EXPERT.replace("s.3", "s.8"): t[EXPERT].clone()})),
    "transposed expert": tensors(lambda t: t.update({EXPERT: t[EXPERT][:, :32].T.contiguous()})),
    "short expert": tensors(lambda t: t.update({EXPERT: t[EXPERT][:-1].clone()})),
    "short router": tensors(lambda t: t.update({ROUTER: t[ROUTER][:-1].clone()})),
    "scalar norm": tensors(lambda t: t.update({NORM: torch.tensor(1.0)})),
    "expert of whole numbers": tensors(lambda t: t.update({EXPERT: t[EXPERT].to(torch.int8)})),
    "expert in float8": tensors(lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)})),
    "one tensor in bfloat16": tensors(lambda t: t.update({NORM: t[NORM].bfloat16()})),
    "all in bfloat16": tensors(lambda t: t.update({n: x.bfloat16() for n, x in t.items()})),
    "all in float16": tensors(lambda t: t.update({n: x.half() for n, x in t.items()})),
    "index lacks a tensor": index(lambda m: {"weight_map": {n: f for n, f in m.items() if n != EXPERT}}),
    "index has one too many": index(lambda m: {"weight_map": {**m, "model.layers.9.x": SINGLE}}),
    "index names a missing file": index(lambda m: {"weight_map": {**m, EXPERT: "other.safetensors"}}),
    "index is empty": index(lambda m: {}),
    "index is a list": index(lambda m: []),
    "index is text": index(lambda m: "x"),
    "index of a list": index(lambda m: {"weight_map": [1]}),
    "index of numbers": index(lambda m: {"weight_map": {EXPERT: 1}}),
    "index of nothing": index(lambda m: {"weight_map": {}}),
    "index leads out of the folder": index(lambda m: {"weight_map": dict.fromkeys(m, f"../damaged/{SINGLE}")}),
    "index with a name twice": index(lambda m: f'{{"weight_map": {{"{NORM}": "{SINGLE}", "{NORM}": "{SINGLE}"}}}}'),
    "index is not UTF-8": lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe"),
    "index is a folder": lambda folder: (folder / INDEX).mkdir(),
    "no weights": lambda folder: (folder / SINGLE).unlink(),
    "weights are a folder": replaced(SINGLE, lambda path: path.mkdir()),
    "weights are a pipe": replaced(SINGLE, os.mkfifo),
    "weights are a loop of links": replaced(SINGLE, lambda path: path.symlink_to(path.name)),
    "a second file": lambda folder: shutil.copy(folder / SINGLE, folder / "b.safetensors"),
    "another head than the embedding": config(tie_word_embeddings=True),
    "another width": config(moe_intermediate_size=32),
    "another number of experts": config(num_experts=7, num_local_experts=7),
    "another number of layers": config(num_hidden_layers=1),
    "another dtype": config(dtype="bfloat16", torch_dtype="bfloat16"),
}
OF_CONFIG: dict[str, Damage] = {
    "list": raw(lambda b: b"[]", "config.json"),
    "nothing": raw(lambda b: b"", "config.json"),
    "half": raw(lambda b: b[: len(b) // 2], "config.json"),
    "not UTF-8": raw(lambda b: b"\xff", "config.json"),
    "UTF-16": raw(lambda b: b.decode().encode("utf-16"), "config.json"),
    "deep": raw(lambda b: b'{"a":' + b"[" * 200_000, "config.json"),
    "quantised": config(quantization_config={"quant_method": "fp8"}),
    "no dtype": config(dtype=None, torch_dtype=None),
    "dtype of no kind": config(dtype="int7", torch_dtype="int7"),
    "dtype is a list": config(dtype=["float32"], torch_dtype=None),
    "float16": config(dtype="float16", torch_dtype="float16"),
    "sizes are text": config(hidden_size="64"),
    "architectures are a number": config(architectures=5),
    "model_type is a list": config(model_type=[]),
}


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """The rest of a command line that is right."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    words = "--platform cpu --rollout-batch-size 1 --n-samples-per-prompt 2 --num-rollout 1 --lr 1e-4 --label-key label"
    more = "--rm-type exact_match --rollout-max-response-len 8 --prompt-data"
    return [*words.split(), *more.split(), str(tmp_path / "prompts.jsonl"), "--run-dir", str(tmp_path / "run")]


def assert_one_line_each(error: str, problems: int | None = None) -> None:
    lines = error.splitlines()
    assert lines and all(line.startswith("vime: ") and len(line) < 1500 for line in lines), error
    assert "Traceback" not in error and (problems is None or len(lines) == problems), error


def test_the_whole_one_is_accepted(damaged: Callable[[Damage], Path], settings: list[str], tmp_path: Path) -> None:
    folder = damaged(lambda folder: None)
    resolve([*settings, "--hf-checkpoint", str(folder)])
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("damage", OF_WEIGHTS.values(), ids=OF_WEIGHTS)
def test_damaged_weights_are_refused_by_a_run_and_by_convert(
    damaged: Callable[[Damage], Path],
    damage: Damage,
    settings: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = damaged(damage)
    with pytest.raises(ConfigError) as caught:
        resolve([*settings, "--hf-checkpoint", str(folder)])
    assert all(str(folder) in problem and "\n" not in problem for problem in caught.value.problems)
    capsys.readouterr()
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert_one_line_each(capsys.readouterr().err, len(caught.value.problems))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged", "prompts.jsonl"]


@pytest.mark.parametrize("damage", OF_CONFIG.values(), ids=OF_CONFIG)
def test_a_damaged_config_is_refused_by_every_command(
    damaged: Callable[[Damage], Path],
    damage: Damage,
    settings: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = damaged(damage)
    capsys.readouterr()
    for words in (["config", *settings, "--hf-checkpoint", str(folder)], ["convert", str(folder), str(tmp_path / "o")]):
        assert main(words) == 2, words[0]
        assert_one_line_each(capsys.readouterr().err)


def test_random_damage_to_any_file_gives_no_traceback(
    damaged: Callable[[Damage], Path], settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes changed, cut out and doubled at places drawn by a fixed seed."""
    folder, draw = damaged(index(lambda where: {"weight_map": where})), random.Random(5)
    whole = {name: (folder / name).read_bytes() for name in ("config.json", INDEX, SINGLE)}
    refused = 0
    for k in range(60):
        name = list(whole)[k % 3]
        content = whole[name]
        reach = 3000 if name == SINGLE else len(content)
        a, b = sorted(draw.randrange(reach) for _ in range(2))
        other = draw.choice(
            [b"", bytes([draw.randrange(256)]), content[a:b] * 2, b"null", b"-1", b'"', b"{", b"9" * 40]
        )
        (folder / name).write_bytes(content[:a] + other + content[b if draw.random() < 0.5 else a + 1 :])
        try:
            resolve([*settings, "--hf-checkpoint", str(folder)])
        except ConfigError as error:
            refused += 1
            assert all("\n" not in problem for problem in error.problems), error
        (folder / name).write_bytes(content)
    capsys.readouterr()
    assert refused > 40


@pytest.mark.parametrize("name", ["a" * 300, "~no-such-user/model", "x\0y", "", "a/b/c"])
def test_a_name_that_no_checkpoint_can_have_is_refused(
    name: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *settings, "--hf-checkpoint", name]) == 2
    assert_one_line_each(capsys.readouterr().err, 1)


def test_a_stored_dtype_is_chosen_by_a_flag(
    damaged: Callable[[Damage], Path], settings: list[str], tmp_path: Path
) -> None:
    folder = damaged(OF_WEIGHTS["one tensor in bfloat16"])
    words = [*settings, "--hf-checkpoint", str(folder)]
    with pytest.raises(ConfigError, match=r"float32, 1 bfloat16 \(such as model.norm.weight\); give --bf16"):
        resolve(words)
    for flag in ("--bf16", "--no-bf16"):
        resolve([*words, flag])
    with pytest.raises(ConfigError, match="choose one with --dtype float32 or --dtype bfloat16"):
        convert(folder, tmp_path / "out")
    assert "read back" in convert(folder, tmp_path / "out", dtype="float32")


def test_float16_is_not_trained_in_and_may_be_served(
    damaged: Callable[[Damage], Path], settings: list[str], tmp_path: Path
) -> None:
    folder = damaged(OF_WEIGHTS["all in float16"])
    config(dtype="float16", torch_dtype="float16")(folder)
    words = [*settings, "--hf-checkpoint", str(folder)]
    with pytest.raises(ConfigError, match="float16, which is not trained in"):
        resolve(words)
    resolve([*words, "--no-bf16"])
    resolve([*words, "--num-rollout", "0", "--eval-prompt-data", "held", str(tmp_path / "prompts.jsonl")])


def test_a_reference_of_another_model_or_damaged_is_refused_before_the_start(
    damaged: Callable[[Damage], Path], tiny_qwen3_moe: Path, settings: list[str]
) -> None:
    folder = damaged(lambda folder: None)
    words = [*settings, "--hf-checkpoint", str(tiny_qwen3_moe), "--ref-load", str(folder)]
    words += ["--use-kl-loss", "--kl-loss-coef", "0.1"]
    resolve(words)
    config(initializer_range=0.5)(folder)
    resolve(words)
    config(rms_norm_eps=0.1)(folder)
    with pytest.raises(ConfigError, match=r"another architecture than .*: layernorm_epsilon 0.1 and 1e-06"):
        resolve(words)
    config(vocab_size=319)(folder)
    with pytest.raises(ConfigError, match="has a vocabulary of 319, the policy of 320"):
        resolve(words)
    config(vocab_size=320, rms_norm_eps=1e-6)(folder)
    OF_WEIGHTS["missing tensor"](folder)
    with pytest.raises(ConfigError, match=r"--ref-load: .* lacks 1 tensor"):
        resolve(words)
    of_reward = [word for word in words if word not in ("--use-kl-loss", "--kl-loss-coef", "0.1")]
    with pytest.raises(ConfigError, match=r"--ref-load: .* lacks 1 tensor"):
        resolve([*of_reward, "--kl-coef", "0.1"])
