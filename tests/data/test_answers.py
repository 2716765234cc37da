"""Files of answers to learn: what is read of a row, what is refused before training, what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat import call, result, says, tokenizer_of, tool, user
from vime.config import Config, DataConfig, RolloutConfig, TrainConfig
from vime.data.prompt_set import PromptSet
from vime.data.prompts import check_prompts, tokenise_prompts
from vime.errors import DataError

SFT = "vime.rollout.sft_rollout.generate_rollout"


def read(
    path: Path,
    *rows: Any,
    family: str = "smollm2",
    tokenizer: Any = None,
    rollout: dict[str, Any] | None = None,
    train: TrainConfig = TrainConfig(),  # noqa: B008 - frozen
    **data: Any,
) -> PromptSet:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {"input_key": "messages", "apply_chat_template": True} | data
    config = Config(
        data=DataConfig(prompt_data=[str(path)], **settings),
        rollout=RolloutConfig(rollout_function_path=SFT, **rollout or {}),
        train=train,
    )
    return tokenise_prompts(config, check_prompts(config, None), tokenizer or tokenizer_of(family))


def test_a_conversation_is_read_as_a_prompt_and_what_follows_it(tmp_path: Path) -> None:
    talk = [user("a"), says("A"), user("b"), says("B", weight=0)]
    (prompt,) = read(tmp_path / "d.jsonl", {"messages": talk})
    assert (prompt.prompt, prompt.label) == (talk[:1], talk[1:])
    tokenizer = tokenizer_of("smollm2")
    assert tokenizer.decode(prompt.tokens).endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    (prompt,) = read(tmp_path / "d.jsonl", {"messages": [*talk[:3], says("B")]}, sft_turns="last")
    assert (prompt.prompt, prompt.label) == (talk[:3], [says("B")])


def test_rows_that_cannot_be_learnt_are_named_before_training(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with pytest.raises(DataError) as caught:
        read(path, {"messages": [user("a")]}, {"messages": [user("a"), says("")]}, {"messages": [user("a"), says("A")]})
    assert str(caught.value).splitlines() == [
        f"{path}: 2 of 3 lines cannot be used",
        "  line 1: holds nothing to learn: no message has the role 'assistant', the roles are ['user']",
        "  line 2: 'messages'[1], of the role assistant, says nothing: it has neither content nor tool_calls",
    ]
    asks = [user("a"), says("", call("calc", {})), result("5"), says("5")]
    with pytest.raises(DataError, match=r"line 2: the chat template does not write the call of 'calc' in message 1"):
        read(path, {"messages": [user("a"), says("A")]}, {"messages": asks})
    with pytest.raises(DataError, match=r"line 1: 'answer' is empty; supervised training needs an answer"):
        read(path, {"q": "a", "answer": []}, input_key="q", label_key="answer")


def test_tools_reach_the_template(tmp_path: Path) -> None:
    asks = [user("a"), says("", call("calc", {})), result("5"), says("5")]
    (prompt,) = read(tmp_path / "d.jsonl", {"messages": asks, "tools": [tool("calc")]}, family="qwen3")
    assert json.dumps(tool("calc")) in tokenizer_of("qwen3").decode(prompt.tokens)


def test_long_answers_are_left_out_and_counted_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [user("a"), says("A" * n)]} for n in (3, 30)]
    path, limit = tmp_path / "d.jsonl", {"rollout_max_response_len": 10}
    assert len(read(path, *rows, rollout=limit)) == 2
    kept = read(path, *rows, rollout=limit, sft_overlong="drop")
    assert (len(kept), kept.num_long_answers, kept.num_dropped) == (1, 1, 1)
    assert "1 of 2 prompts are left out: 1 are with an answer above --rollout-max-response-len" in caplog.text
    split = {"messages": [user("a"), says("A"), user("b"), says("B" * 200)]}  # two samples; the second is too long
    kept = read(path, rows[0], split, family="qwen3", rollout={"rollout_max_context_len": 150}, sft_overlong="drop")
    assert len(kept) == 1
    with pytest.raises(DataError, match="none of its 1 prompts can be used: 1 are with an answer above"):
        read(path, rows[1], rollout=limit, sft_overlong="drop")


def test_a_sample_that_no_forward_pass_takes_is_named_before_training(tmp_path: Path) -> None:
    rows = [{"messages": [user("a"), says("A" * n)]} for n in (3, 90)]
    budget = TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=120)
    path = tmp_path / "d.jsonl"
    with pytest.raises(DataError, match=r"line 2: has 149 tokens, and no forward pass takes more than 120 \(--max-tok"):
        read(path, *rows, train=budget)
    assert len(read(path, *rows, train=budget, rollout={"rollout_max_context_len": 120})) == 2
    limits = {"rollout_max_context_len": 130}
    assert len(read(path, *rows, train=budget, rollout=limits, sft_overlong="drop")) == 1
    asks = {"messages": [user("a" * 200), says("A")]}  # left out for its prompt
    assert len(read(path, rows[0], asks, train=budget, rollout_max_prompt_len=100)) == 1


def test_what_the_template_leaves_out_or_splits_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    talk = [user("a"), says("A", reasoning_content="because"), user("b"), says("B", reasoning_content="thus")]
    read(tmp_path / "d.jsonl", {"messages": talk}, {"messages": talk})
    assert "the chat template leaves out the reasoning of 4 of the turns that are learnt" in caplog.text
    caplog.clear()
    read(tmp_path / "d.jsonl", {"messages": talk}, {"messages": talk[:2]}, family="qwen3")
    assert "1 of 2 conversations are learnt as several samples" in caplog.text
    assert "leaves out" not in caplog.text


def test_a_template_whose_turns_engines_would_not_end_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_a_base_model = tokenizer_of("qwen3")
    of_a_base_model.eos_token = "<|endoftext|>"
    read(tmp_path / "d.jsonl", {"messages": [user("a"), says("A")]}, tokenizer=of_a_base_model)
    assert "ends the assistant's turns with '<|im_end|>', which is learnt, but generation ends at" in caplog.text
