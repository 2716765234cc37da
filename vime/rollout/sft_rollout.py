"""The rollout function of supervised training: the responses are the data's own answers; nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vime.data.answers import Answer, Answers, make_answers
from vime.data.bad_row import BadRow
from vime.data.source import take_groups
from vime.errors import ConfigError, DataError
from vime.protocols import DataSource, Engines, RolloutContext
from vime.rollout.stats import length_metrics
from vime.types import Group, RolloutResult, Sample, SampleStatus


def generate_rollout(
    config: RolloutContext,
    rollout_id: int,
    data_source: DataSource,
    engines: Engines | None,
    evaluation: bool = False,
) -> RolloutResult:
    """--rollout-batch-size prompts with their labels as supervised responses (`Sample.supervised`).

    A label is the answer's text, or a list of chat messages that follow the prompt's. Of messages the assistant's
    turns are learnt (`vime.data.turns`); what stands between them is in the response with mask 0. A conversation whose
    prompts do not continue each other becomes several samples of one trajectory. A response longer than
    --rollout-max-response-len or the context is cut and counted as truncated.

    Args: engines: not used; there may be none.
    Returns: a group for each prompt, in the order of the data, without rewards.
    Raises: ConfigError for more than one sample per prompt, or when asked to evaluate; DataError naming the sample for
        a label that is missing or cannot be learnt.
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
    answers = make_answers(settings, config.tokenizer)
    rows = []
    for sample in samples:
        try:
            rows.append((sample.tokens, answers.texts(sample.prompt, sample.label, sample.metadata)))
        except BadRow as problem:
            raise DataError(
                f"sample {sample.sample_id} has the label {str(sample.label)[:100]!r}: {problem}"
            ) from problem
    made = [
        Group(sample.group_id, _learnt(sample, found, answers))
        for sample, found in zip(samples, answers.tokenise(rows), strict=True)
    ]
    return RolloutResult(made, _metrics(made))


def _learnt(sample: Sample, found: Sequence[Answer], answers: Answers) -> list[Sample]:
    """The sample with its response, or siblings of one trajectory."""
    fitting = [answer for answer in found if answers.room(answer) >= 1]
    if not fitting:
        raise DataError(
            f"sample {sample.sample_id}: its prompt of {len(found[0].prompt)} tokens leaves no room to answer"
        )
    is_cut = len(fitting) < len(found) or any(answer.response_length > answers.room(answer) for answer in found)
    status = SampleStatus.TRUNCATED if is_cut else SampleStatus.COMPLETED
    siblings = [replace(sample, tokens=answer.prompt, metadata=dict(sample.metadata)) for answer in fitting]
    for sibling, answer in zip(siblings, fitting, strict=True):
        room = answers.room(answer)
        for ids, is_learnt in answer.parts:
            taken = ids[:room]
            if is_learnt:
                sibling.append_response(taken, supervised=True)
            else:
                sibling.append_response(taken, trainable=False)
            room -= len(taken)
        sibling.response, sibling.status = answer.text, status
    return siblings


def _metrics(groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.response_length for sample in samples]
    return {
        **length_metrics("rollout/response_len", lengths),
        "rollout/truncated_ratio": sum(s.status is SampleStatus.TRUNCATED for s in samples) / len(samples),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_tokens": float(sum(lengths)),
        "rollout/num_learnt_tokens": float(sum(sum(sample.loss_mask) for sample in samples)),
    }
