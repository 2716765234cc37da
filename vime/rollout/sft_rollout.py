"""The rollout function of supervised training: the responses are the data's own answers; nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime.config import Config
from vime.data.chat import chat_kwargs_of, render_chat
from vime.data.source import take_groups
from vime.errors import ConfigError, DataError
from vime.protocols import DataSource, Engines, RolloutContext
from vime.rollout.stats import length_metrics
from vime.types import Group, Message, RolloutResult, Sample, SampleStatus


def generate_rollout(
    config: RolloutContext,
    rollout_id: int,
    data_source: DataSource,
    engines: Engines | None,
    evaluation: bool = False,
) -> RolloutResult:
    """--rollout-batch-size prompts with their labels as supervised responses (`Sample.supervised`, mask 1).

    A label is the answer's text, or a list of chat messages that follow the prompt's. Prompt and answer are tokenised
    apart, as they are when a model generates. The answer ends with the last end-of-sequence token that the chat
    template puts there, or one is appended. An answer longer than --rollout-max-response-len or the context is cut
    and counted as truncated.

    Args: engines: not used; there may be none.
    Returns: groups of one sample in the order of the data, without rewards.
    Raises: ConfigError for more than one sample per prompt, or when asked to evaluate; DataError naming the sample for
        a label that is missing or neither text nor messages.
    """
    if evaluation:
        raise ConfigError(
            "supervised data cannot be evaluated by generation without engines; give --eval-function-path "
            "vime.rollout.vllm_rollout.generate_rollout in a run that has them"
        )
    settings = config.config
    groups = take_groups(data_source, settings.rollout.rollout_batch_size)
    if any(len(group.samples) != 1 for group in groups):
        raise ConfigError("--n-samples-per-prompt must be 1 with supervised data: every further sample is the same")
    samples = [group.samples[0] for group in groups]
    texts = [_answer_text(sample, settings, config.tokenizer) for sample in samples]
    ids = config.tokenizer(texts, add_special_tokens=False)["input_ids"]
    for sample, text, answer in zip(samples, texts, ids, strict=True):
        _answer(sample, text, _ended(answer, config.tokenizer), settings)
    return RolloutResult(groups, _metrics(groups))


def _answer_text(sample: Sample, settings: Config, tokenizer: Any) -> str:
    label = sample.label
    chat = settings.data.apply_chat_template
    if isinstance(label, str) and label and not chat:
        return label
    if isinstance(label, str) and label:
        label = [{"role": "assistant", "content": label}]
    is_messages = isinstance(label, list) and label and all(isinstance(m, dict) and "role" in m for m in label)
    if not is_messages or not chat:
        raise DataError(
            f"sample {sample.sample_id} has the label {str(label)[:100]!r}; supervised training needs an answer as "
            f"text, or as messages with --apply-chat-template (--label-key names its key)"
        )
    return _rendered_answer(sample, label, settings, tokenizer)


def _rendered_answer(sample: Sample, label: list[Message], settings: Config, tokenizer: Any) -> str:
    """What the chat template adds to the prompt's text when the answer is there."""
    prompt = sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
    tools = sample.metadata.get("tools")
    kwargs = chat_kwargs_of(sample.metadata, settings.data.apply_chat_template_kwargs)
    before = render_chat(tokenizer, prompt, tools=tools, kwargs=kwargs)
    whole = render_chat(tokenizer, [*prompt, *label], tools=tools, kwargs={**kwargs, "add_generation_prompt": False})
    if not whole.startswith(before):
        raise DataError(
            f"sample {sample.sample_id}: the chat template writes the prompt differently when an answer follows, so "
            f"the model would be trained on a prompt it never sees; give the answer as text and render it yourself"
        )
    return whole[len(before) :]


def _ended(answer: Sequence[int], tokenizer: Any) -> list[int]:
    """The answer up to its last end-of-sequence token: what a template writes after it, no model should learn."""
    ids = list(answer)
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so a response could never be taught to end")
    if eos not in ids:
        return [*ids, eos]
    return ids[: len(ids) - ids[::-1].index(eos)]


def _answer(sample: Sample, text: str, ids: list[int], settings: Config) -> None:
    limit = settings.rollout.rollout_max_response_len
    if (context := settings.rollout.rollout_max_context_len) is not None:
        limit = min(limit, context - len(sample.tokens))
    if limit < 1:
        raise DataError(
            f"sample {sample.sample_id}: its prompt of {len(sample.tokens)} tokens leaves no room to answer"
        )
    sample.append_response(ids[:limit], supervised=True)
    sample.response = text
    sample.status = SampleStatus.COMPLETED if len(ids) <= limit else SampleStatus.TRUNCATED


def _metrics(groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.response_length for sample in samples]
    return {
        **length_metrics("rollout/response_len", lengths),
        "rollout/truncated_ratio": sum(s.status is SampleStatus.TRUNCATED for s in samples) / len(samples),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_tokens": float(sum(lengths)),
    }
