"""Supervised samples: the data's answers as responses, without log-probs that nobody sampled."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from vime.config import AlgoConfig, Config, DataConfig, RolloutConfig, TrainConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.errors import ConfigError, DataError
from vime.loop.batch import make_train_batch
from vime.observability.metrics import check_names
from vime.protocols import RolloutContext
from vime.rollout.sft_rollout import generate_rollout
from vime.types import RolloutResult, Sample, SampleStatus


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return char_tokenizer()


TRAIN: dict[str, Any] = {"rollout_id": 0, "train": TrainConfig(), "dp_size": 1, "reward_key": None}


def run(tokenizer: Any, *prompts: Prompt, n: int = 1, chat: bool = False, **rollout: Any) -> RolloutResult:
    config = Config(
        data=DataConfig(apply_chat_template=chat),
        rollout=RolloutConfig(**({"rollout_batch_size": len(prompts)} | rollout)),
    )
    context = RolloutContext(config, engines=None, tokenizer=tokenizer, reward=None)  # type: ignore[arg-type]
    source = DataBuffer(prompts, n_samples_per_prompt=n, shuffle=False, seed=0)
    result = generate_rollout(context, 0, source, None)
    check_names(result.metrics)
    return result


def prompt(tokenizer: Any, text: Any, label: Any, rendered: str | None = None) -> Prompt:
    return Prompt(text, tuple(tokenizer(rendered or text, add_special_tokens=False)["input_ids"]), label)


def test_the_label_and_an_end_become_the_response(tokenizer: Any) -> None:
    result = run(tokenizer, prompt(tokenizer, "1+1=", "2"), prompt(tokenizer, "9+9=", "18"))
    sample = result.groups[1].samples[0]
    assert tokenizer.decode(sample.prompt_tokens) == "9+9="
    assert tokenizer.decode(sample.response_tokens) == "18$"
    assert sample.response == "18$"
    assert sample.loss_mask == (1, 1, 1)
    assert sample.supervised
    assert all(math.isnan(lp) for lp in sample.rollout_log_probs)
    assert sample.status is SampleStatus.COMPLETED
    assert sample.reward is None
    assert result.metrics["rollout/response_len/mean"] == 2.5


def test_an_answer_that_ends_already_is_not_ended_twice(tokenizer: Any) -> None:
    (group,) = run(tokenizer, prompt(tokenizer, "x", "ab$")).groups
    assert tokenizer.decode(group.samples[0].response_tokens) == "ab$"


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("hello", "hello$"),
        ([{"role": "assistant", "content": "hello"}], "hello$"),
        (
            [
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
            ],
            "a$\n[user]b$\n[assistant]c$",
        ),
    ],
)
def test_chat_answers_are_rendered_by_the_template(tokenizer: Any, label: Any, answer: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for text in (messages, "hi"):
        (group,) = run(tokenizer, prompt(tokenizer, text, label, "[user]hi$\n[assistant]"), chat=True).groups
        assert tokenizer.decode(group.samples[0].response_tokens) == answer


def test_of_a_conversation_the_assistants_turns_are_learnt(tokenizer: Any) -> None:
    messages = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "tool", "content": "c"},
    ]
    label = [*messages, {"role": "assistant", "content": "d"}]
    result = run(tokenizer, prompt(tokenizer, "hi", label, "[user]hi$\n[assistant]"), chat=True)
    (sample,) = result.groups[0].samples
    learnt = [tokenizer.decode([t]) for t, m in zip(sample.response_tokens, sample.loss_mask, strict=True) if m]
    assert "".join(learnt) == "a$d$"
    assert sample.response == "a$\n[user]b$\n[tool]c$\n[assistant]d$"
    assert (result.metrics["rollout/num_learnt_tokens"], result.metrics["rollout/num_tokens"]) == (4, 34)


def test_a_conversation_that_does_not_render_as_one_becomes_siblings(tokenizer: Any) -> None:
    split = char_tokenizer()
    split.chat_template = (
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else 'x' }}"
        "{{ '$' if m.role == 'assistant' else '>' }}{% endfor %}"
    )
    label = [
        {"role": "assistant", "content": c} if i % 2 == 0 else {"role": "user", "content": c}
        for i, c in enumerate("AbC")
    ]
    result = run(split, prompt(split, "hi", label, "hi>"), prompt(split, "hi", "Z", "hi>"), chat=True)
    first, second = result.groups[0].samples
    assert [tokenizer.decode(s.tokens) for s in (first, second)] == ["hi>A$", "hi>x$b>C$"]
    assert [s.loss_mask for s in (first, second)] == [(1, 1)] * 2
    assert {(s.group_id, s.trajectory_id, s.sample_id) for s in (first, second)} == {(0, 0, 0)}
    assert first.metadata is not second.metadata
    batch, _ = make_train_batch(
        result.groups, algo=AlgoConfig(loss_type="sft_loss"), **TRAIN | {"global_batch_size": 2}
    )
    assert batch.loss_weights[batch.loss_mask == 1].tolist() == pytest.approx([1 / 6] * 6)
    # What does not fit is left out, and the rest of the conversation counts as cut.
    (group,) = run(split, prompt(split, "hi", label, "hi>"), chat=True, rollout_max_context_len=6).groups
    assert [(split.decode(s.tokens), s.status) for s in group.samples] == [("hi>A$", SampleStatus.TRUNCATED)]


def test_a_cut_may_fall_between_turns(tokenizer: Any) -> None:
    label = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    one = prompt(tokenizer, "hi", label, "[user]hi$\n[assistant]")
    for limit, mask in ((1, (1,)), (5, (1, 1, 0, 0, 0)), (22, (1, 1, *[0] * 20))):
        (group,) = run(tokenizer, one, chat=True, rollout_max_response_len=limit).groups
        (sample,) = group.samples
        assert (sample.loss_mask, sample.status) == (mask, SampleStatus.TRUNCATED)


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="writes the prompt differently"):
        run(tokenizer, prompt(tokenizer, "hi", "x"), chat=True)


def test_long_answers_are_cut_and_counted(tokenizer: Any) -> None:
    result = run(tokenizer, prompt(tokenizer, "x", "abc"), prompt(tokenizer, "x", "a"), rollout_max_response_len=2)
    assert [s.samples[0].status for s in result.groups] == [SampleStatus.TRUNCATED, SampleStatus.COMPLETED]
    assert result.groups[0].samples[0].response_length == 2
    assert result.metrics["rollout/truncated_ratio"] == 0.5
    (group,) = run(tokenizer, prompt(tokenizer, "xyz", "abc"), rollout_max_context_len=5).groups
    assert len(group.samples[0].tokens) == 5
    with pytest.raises(DataError, match="no room"):
        run(tokenizer, prompt(tokenizer, "xyz", "abc"), rollout_max_context_len=3)


@pytest.mark.parametrize("label", [None, "", 4, [], [{"role": "assistant", "content": "x"}]])
def test_labels_that_are_no_answer_are_named(tokenizer: Any, label: Any) -> None:
    with pytest.raises(DataError, match="sample 0 has the label"):
        run(tokenizer, prompt(tokenizer, "x", label))


def test_misuse_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="--n-samples-per-prompt must be 1"):
        run(tokenizer, prompt(tokenizer, "x", "y"), n=2)
    with pytest.raises(ConfigError, match="cannot be evaluated"):
        generate_rollout(None, 0, None, None, evaluation=True)  # type: ignore[arg-type]


def test_supervised_samples_train_with_sft_loss_and_never_with_a_policy_loss(tokenizer: Any) -> None:
    result = run(tokenizer, prompt(tokenizer, "1+1=", "2"))
    settings = TRAIN | {"global_batch_size": 1}
    batch, _ = make_train_batch(result.groups, algo=AlgoConfig(loss_type="sft_loss"), **settings)
    assert batch.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    result.groups[0].samples[0].reward = 1.0
    with pytest.raises(DataError, match="supervised tokens are for --loss-type sft_loss"):
        make_train_batch(result.groups, algo=AlgoConfig(), **settings)


def test_sampled_and_supervised_tokens_do_not_mix() -> None:
    sampled = Sample(tokens=(1,))
    sampled.append_response([2], [-0.5])
    with pytest.raises(ValueError, match="cannot share a sample"):
        sampled.append_response([3], supervised=True)
    supervised = Sample(tokens=(1,))
    supervised.append_response([2], supervised=True)
    supervised.append_response([3], trainable=False)
    supervised.append_response([4], supervised=True)
    assert supervised.loss_mask == (1, 0, 1)
    with pytest.raises(ValueError, match="cannot share a sample"):
        supervised.append_response([5], [-0.5])
    with pytest.raises(ValueError, match="nobody sampled them"):
        supervised.append_response([5], [-0.5], supervised=True)
    with pytest.raises(ValueError, match="log-probs, got none"):
        Sample(tokens=(1,)).append_response([2])
    with pytest.raises(AttributeError, match="aligned"):
        sampled.supervised = True
    assert supervised.tokens == (1, 2, 3, 4)
