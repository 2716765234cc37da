"""Which tokens of a rendered conversation are the assistant's own, in four families' chat formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.chat import FORMATS, answers_of, call, first_said, result, says, system, tokenizer_of, tool, user
from tests.fakes import char_tokenizer
from vime.data.answers import Answer, Answers, stop_tokens
from vime.data.bad_row import BadRow
from vime.data.chat import render_chat
from vime.data.turns import text_between_turns
from vime.errors import ConfigError, DataError

TOKENIZERS = {family: tokenizer_of(family) for family in FORMATS}


def learn(family: str, messages: Sequence[Any], *, tools: Sequence[Any] = (), **settings: Any) -> list[Answer]:
    """A conversation's samples; the row's own prompt is what precedes the assistant's first message."""
    tokenizer = TOKENIZERS[family]
    answers = answers_of(tokenizer, family, **settings)
    n = first_said(messages)
    kwargs = {k: v for k, v in settings.items() if k not in ("turns", "max_response_len", "max_context_len")}
    prompt = render_chat(tokenizer, messages[:n], tools=tools, kwargs=kwargs)
    pieces = answers.texts(messages[:n], list(messages[n:]), {"tools": list(tools)} if tools else {})
    (found,) = answers.tokenise([(tokenizer(prompt, add_special_tokens=False)["input_ids"], pieces)])
    return found


def shown(family: str, answer: Answer) -> list[str]:
    """Prompt, then parts: text that is learnt stands in «»."""
    decode = TOKENIZERS[family].decode
    return [decode(answer.prompt), *(f"«{decode(ids)}»" if learnt else decode(ids) for ids, learnt in answer.parts)]


CALC = tool("calc")
TOOL_TALK = [
    user("2+3, doubled?"),
    says("", call("calc", {"x": "2+3"}), reasoning_content="first the sum"),
    result("5"),
    says("", call("calc", {"x": "5*2"}), reasoning_content="now twice that"),
    result("10"),
    says("Ten.", reasoning_content="done"),
]


def test_qwen3_learns_reasoning_calls_and_ends_of_a_tool_loop_and_nothing_else() -> None:
    (answer,) = learn("qwen3", TOOL_TALK, tools=[CALC])
    assert shown("qwen3", answer) == [
        f"<|im_start|>system\nTools:\n{json.dumps(CALC)}<|im_end|>\n"
        "<|im_start|>user\n2+3, doubled?<|im_end|>\n<|im_start|>assistant\n",
        "«<think>\nfirst the sum\n</think>\n\n"
        '<tool_call>\n{"name": "calc", "arguments": {"x": "2+3"}}\n</tool_call><|im_end|>»',
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "«<think>\nnow twice that\n</think>\n\n"
        '<tool_call>\n{"name": "calc", "arguments": {"x": "5*2"}}\n</tool_call><|im_end|>»',
        "\n<|im_start|>user\n<tool_response>\n10\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "«<think>\ndone\n</think>\n\nTen.<|im_end|>»",
    ]


def test_neighbouring_tool_results_share_a_turn_and_none_is_lost() -> None:
    messages = [user("?"), says("", call("calc", {}), call("calc", {})), result("5"), result("6"), says("5, 6.")]
    (_, answer) = learn("qwen3", messages, tools=[CALC])
    assert "\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>" in shown("qwen3", answer)[0]
    (answer,) = learn("glm4_moe", messages, tools=[CALC])
    assert shown("glm4_moe", answer)[2:] == [
        "\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|assistant|>",
        "«\n<think></think>\n5, 6.<|user|>»",
    ]


def test_a_template_that_drops_earlier_reasoning_gives_a_sample_for_each_question() -> None:
    messages = [user("a?"), says("A", reasoning_content="r1"), user("b?"), says("B", reasoning_content="r2")]
    first, second = learn("qwen3", messages)
    assert shown("qwen3", first)[1:] == ["«<think>\nr1\n</think>\n\nA<|im_end|>»"]
    assert shown("qwen3", second) == [
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"  # as the model will see it: no reasoning
        "<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n",
        "«<think>\nr2\n</think>\n\nB<|im_end|>»",
    ]


def test_with_the_reasoning_closed_in_the_prompt_only_the_answer_is_learnt() -> None:
    (answer,) = learn("qwen3", [user("a?"), says("A")], enable_thinking=False)
    prompt, said = shown("qwen3", answer)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert said == "«A<|im_end|>»"
    with pytest.raises(BadRow, match="writes the prompt differently when message 1 follows"):
        learn("qwen3", [user("a?"), says("A", reasoning_content="r")], enable_thinking=False)


def test_glm_learns_the_next_roles_token_as_the_end_of_its_turn() -> None:
    (answer,) = learn("glm4_moe", TOOL_TALK, tools=[CALC])
    assert shown("glm4_moe", answer)[1:] == [
        "«\n<think>first the sum</think>\n"
        "<tool_call>calc\n<arg_key>x</arg_key>\n<arg_value>2+3</arg_value>\n</tool_call><|observation|>»",
        "\n<tool_response>\n5\n</tool_response><|assistant|>",
        "«\n<think>now twice that</think>\n"
        "<tool_call>calc\n<arg_key>x</arg_key>\n<arg_value>5*2</arg_value>\n</tool_call><|observation|>»",
        "\n<tool_response>\n10\n</tool_response><|assistant|>",
        "«\n<think>done</think>\nTen.<|user|>»",
    ]
    (answer,) = learn("glm4_moe", [user("a?"), says("A"), user("b?"), says("B")], enable_thinking=False)
    assert shown("glm4_moe", answer) == [
        "[gMASK]<sop><|user|>\na?/nothink<|assistant|>\n<think></think>",
        "«\nA<|user|>»",
        "\nb?/nothink<|assistant|>\n<think></think>",
        "«\nB<|user|>»",
    ]


def test_llama_has_one_first_token_and_a_system_turn_that_nobody_wrote() -> None:
    messages = [
        user("2+3?"),
        says("", call("calc", '{"x": "2+3"}')),
        result("5"),
        says(" Five. "),
        user("ok"),
        says(":)"),
    ]
    (answer,) = learn("llama3", messages, tools=[CALC], date_string="1 Jan 2026")
    head = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    assert shown("llama3", answer) == [
        f"<|begin_of_text|>{head('system')}Environment: ipython\nToday: 1 Jan 2026\n\n<|eot_id|>"
        f"{head('user')}{json.dumps(CALC)}\n\n2+3?<|eot_id|>{head('assistant')}",
        '«{"name": "calc", "parameters": {"x": "2+3"}}<|eot_id|>»',  # an object again, not text within text
        f'{head("ipython")}"5"<|eot_id|>{head("assistant")}',
        "«Five.<|eot_id|>»",
        f"{head('user')}ok<|eot_id|>{head('assistant')}",
        "«:)<|eot_id|>»",
    ]
    first = TOKENIZERS["llama3"].bos_token_id
    assert (answer.prompt[0], answer.prompt.count(first)) == (first, 1)
    with pytest.raises(BadRow, match="refuses its first 2 messages: one tool call at a time"):
        learn("llama3", [user("?"), says("", call("calc", {}), call("calc", {}))], tools=[CALC])


def test_smollm2_has_a_system_prompt_by_default_and_one_of_the_datas() -> None:
    for messages, written in (([], "You are a helpful assistant."), ([system("Be brief.")], "Be brief.")):
        (answer,) = learn("smollm2", [*messages, user("hi"), says("\n\nyes\n"), user("so"), says("b")])
        assert shown("smollm2", answer) == [
            f"<|im_start|>system\n{written}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
            "«\n\nyes\n<|im_end|>»",
            "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n",
            "«b<|im_end|>»",
        ]


def test_prompt_and_turn_are_tokenised_apart_as_a_model_generates_them() -> None:
    """The whole text has one token for the three line breaks; the engine gets the first, and samples two."""
    tokenizer = TOKENIZERS["smollm2"]
    (answer,) = learn("smollm2", [user("hi"), says("\n\nyes")])
    one, two, three = tokenizer.convert_tokens_to_ids(["Ċ", "ĊĊ", "ĊĊĊ"])
    assert (answer.prompt[-1], answer.parts[0][0][0]) == (one, two)
    text = tokenizer.decode(answer.prompt) + answer.text
    assert three in tokenizer(text, add_special_tokens=False)["input_ids"]


def test_no_line_break_after_the_end_of_a_turn_is_learnt() -> None:
    (answer,) = learn("qwen3", [user("a?"), says("A"), user("b?"), says("B")], turns="last")
    ids, learnt = answer.parts[-1]
    assert learnt
    assert ids[-1] == TOKENIZERS["qwen3"].eos_token_id


@pytest.mark.parametrize("family", FORMATS)
def test_last_learns_the_last_turn_after_the_prompt_it_would_see(family: str) -> None:
    messages = [user("a?"), says("A"), user("b?"), says("B"), user("unanswered")]
    (answer,) = learn(family, messages, turns="last")
    assert [learnt for _, learnt in answer.parts] == [True]
    tokenizer = TOKENIZERS[family]
    prompt = render_chat(tokenizer, messages[:3])
    assert list(answer.prompt) == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_messages_of_weight_0_are_context_and_templates_never_see_the_weight() -> None:
    tokenizer = tokenizer_of("smollm2")
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"
    answers = answers_of(tokenizer, "smollm2")
    for key, no in (("weight", 0), ("train", False), ("step_loss_mask", 0)):
        (piece,) = answers.texts([user("a")], [says("A"), user("b"), says("B", **{key: no}), user("c"), says("C")], {})
        assert [(text.count("content"), learnt) for text, learnt in piece.parts] == [(1, True), (3, False), (1, True)]
        assert key not in "".join(text for text, _ in piece.parts)


@pytest.mark.parametrize("family", FORMATS)
def test_the_mask_is_the_one_that_the_templates_own_marks_give(family: str) -> None:
    """transformers finds the {% generation %} blocks in the rendering of the whole; an independent way to the mask."""
    tokenizer = TOKENIZERS[family]
    messages = [system("s"), user("2+3?"), says("one moment"), user("and?"), says("Five."), user("thanks"), says("np")]
    if family == "qwen3":  # stable after the last question, where all is reasoned
        messages = [
            user("q"),
            says("", call("calc", {}), reasoning_content="r"),
            result("5"),
            says("A", reasoning_content="s"),
        ]
    marked = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    (answer,) = learn(family, messages)
    ids = [*answer.prompt, *(i for part, _ in answer.parts for i in part)]
    mask = [0] * len(answer.prompt) + [int(learnt) for part, learnt in answer.parts for _ in part]
    n = len(marked["input_ids"])
    if family == "glm4_moe":  # the next role's token is the model's to sample, though the next message's to write
        ends = [i for i, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|user|>") and mask[i]]
        assert len(ends) == 3
        mask = [0 if i in ends else m for i, m in enumerate(mask)]
    assert ids[:n] == marked["input_ids"][: len(ids)]
    assert mask[:n] == marked["assistant_masks"][: len(ids)]
    assert not any(marked["assistant_masks"][len(ids) :])


_TEXT = st.text("ab \n</thinkqé{}\"'", max_size=12)
_WORDS = st.builds(lambda text: f"w{text}", _TEXT)


@st.composite
def _conversations(draw: st.DrawFn, *, tools: bool) -> list[dict[str, Any]]:
    messages = [system(draw(_TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(_TEXT)))
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            messages.append(says(draw(_TEXT), call("calc", {"x": draw(_TEXT)}), **draw(_reasoning())))
            messages.append(result(draw(_TEXT)))
        messages.append(says(draw(_WORDS), **draw(_reasoning())))
    return messages


def _reasoning() -> st.SearchStrategy[dict[str, str]]:
    return st.one_of(st.just({}), st.builds(lambda text: {"reasoning_content": text}, _WORDS))


@pytest.mark.parametrize("family", FORMATS)
@given(data=st.data())
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_turn_is_learnt_once_after_exactly_the_prompt_that_generation_gives_it(
    family: str, data: st.DataObject
) -> None:
    tools = [CALC] if family != "smollm2" else []
    messages = data.draw(_conversations(tools=bool(tools)))
    tokenizer = TOKENIZERS[family]
    stops = tokenizer.convert_tokens_to_ids(list(FORMATS[family].stops))
    turns = iter(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for answer in learn(family, messages, tools=tools):
        ids = list(answer.prompt)
        for part, learnt in answer.parts:
            if learnt:
                i = next(turns)
                assert tokenizer.decode(ids) == render_chat(tokenizer, messages[:i], tools=tools)
                assert [token in stops for token in part] == [False] * (len(part) - 1) + [True]
                whole = render_chat(tokenizer, messages[: i + 1], tools=tools, add_generation_prompt=False)
                said = tokenizer.decode([*ids, *part[:-1]])
                assert whole.startswith(said)
                assert whole[len(said) :].strip("\n") in ("", *FORMATS[family].stops)
            ids += part
    assert next(turns, None) is None


@pytest.mark.parametrize("family", FORMATS)
def test_what_generation_appends_between_turns_is_what_stands_between_those_learnt(family: str) -> None:
    messages = [
        user("a"),
        says("", call("calc", {}), reasoning_content="r"),
        result("5"),
        says("b", reasoning_content="s"),
    ]
    if family == "smollm2":
        messages = [user("a"), says("A"), user("b"), says("B")]
    (answer,) = learn(family, messages)
    tokenizer, stops = TOKENIZERS[family], FORMATS[family].stops

    def render(messages: Sequence[Any], generation_prompt: bool) -> str:
        return render_chat(tokenizer, messages, add_generation_prompt=generation_prompt)

    assert text_between_turns(render, messages[2:3], stops) == tokenizer.decode(answer.parts[1][0])
    with pytest.raises(DataError, match="and generation at"):
        text_between_turns(render, messages[2:3], ["<|endoftext|>"] if family != "smollm2" else ["x"])
    if family == "smollm2":
        with pytest.raises(DataError, match="the chat template refuses"):
            text_between_turns(render, [{"role": "tool", "content": None}], stops)


def test_a_stop_token_that_engines_do_not_know_is_learnt_and_told() -> None:
    """A base model's tokenizer ends documents, and the template's turns end in another token."""
    tokenizer = tokenizer_of("qwen3")
    answers = Answers(
        tokenizer,
        stops=["<|endoftext|>"],
        turns="all",
        chat=True,
        chat_kwargs={},
        max_response_len=99,
        max_context_len=None,
    )
    assert answers.ends.closing == "<|im_end|>"
    (piece,) = answers.texts("q", "A", {})
    assert piece.parts == (("<think>\n\n</think>\n\nA<|im_end|>", True),)


def test_a_template_that_ends_nothing_gets_the_end_of_sequence_token() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    answers = Answers(
        tokenizer, stops=["$"], turns="all", chat=True, chat_kwargs={}, max_response_len=99, max_context_len=None
    )
    first, second = answers.texts("q", [says("A"), user("r"), says("B")], {})
    assert first.parts == (("[assistant]A\n$", True),)
    assert (second.prompt, second.parts) == ("[user]q\n[assistant]A\n[user]r\n", (("[assistant]B\n$", True),))


@pytest.mark.parametrize(
    ("family", "messages", "tools", "problem"),
    [
        ("smollm2", [user("?"), says("ok")], [CALC], "does not show the tool 'calc'"),
        ("smollm2", [user("?"), says("", call("calc", {}))], [], "does not write the call of 'calc' in message 1"),
        ("qwen3", [user("?"), says("", call("calc", "{x}"))], [], "arguments of the call of 'calc' are no JSON"),
        ("glm4_moe", [user("?"), says(None, call("calc", {}))], [], "content null, which the chat template writes as"),
        ("qwen3", [user("?"), says("a<|im_end|>b")], [], "holds '<|im_end|>', which ends a turn, before its end"),
        ("smollm2", [user("?"), says("a"), result(None), says("b")], [], "refuses its first 3 messages"),
        ("qwen3", [user("?"), says([{"type": "text", "text": "A"}])], [], "does not write what the assistant says in"),
    ],
)
def test_what_a_template_cannot_write_is_refused(family: str, messages: Any, tools: Any, problem: str) -> None:
    with pytest.raises(BadRow, match=problem.replace("<|im_end|>", r"<\|im_end\|>")):
        learn(family, messages, tools=tools)


def test_what_a_template_leaves_out_is_known() -> None:
    answers = answers_of(TOKENIZERS["llama3"], "llama3")
    turns = [
        says("let me see", call("calc", {}), reasoning_content="because"),
        result("5"),
        says("<think>x</think>Five."),
    ]
    (piece,) = answers.texts("q", turns, {})
    assert piece.left_out == ("content", "reasoning")
    assert answers_of(TOKENIZERS["qwen3"], "qwen3").texts("q", turns[-1:], {})[0].left_out == ()


def test_the_tokens_that_stop_engines_are_the_checkpoints_and_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["glm4_moe"]
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert stop_tokens(tokenizer, None) == ["<|endoftext|>"]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids[0]}))
    assert stop_tokens(tokenizer, tmp_path) == ["<|endoftext|>", "<|user|>"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert stop_tokens(tokenizer, tmp_path) == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    blank = char_tokenizer()
    blank.eos_token = None
    with pytest.raises(ConfigError, match="could never be taught to end"):
        stop_tokens(blank, None)


def test_a_tokenizer_that_puts_a_space_before_every_text_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"▁x": 0, "</s>": 1}, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", chat_template="{{ messages }}")
    with pytest.raises(ConfigError, match="puts a space before every text"):
        answers_of(tokenizer, "smollm2")
