"""Every metric that vime writes: name, unit, definition. A name that is not here is refused.

docs/metrics.md is `as_markdown()`. Names are upstream's where upstream has the quantity. In a name, <x> stands for one
part without a slash.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from vime.errors import VimeError

CUSTOM_PREFIX = "custom/"  # metrics of users' own functions need no entry here


class UnknownMetric(VimeError, ValueError):
    """A metric was emitted that nobody defined."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    definition: str


_TABLE = """
rollout/raw_reward | reward | mean reward over trajectories, as the reward function gave it
rollout/raw_reward/<min-max> | reward | smallest and largest of them (`min`, `max`)
rollout/rewards | reward | mean over trajectories of the reward after the estimator's normalisation; about 0 when groups are centred
rollout/advantages | 1 | mean advantage over trajectories
rollout/advantages/<min-max> | 1 | smallest and largest of them
rollout/zero_std | ratio | groups whose trajectories all have the same reward, so that they teach nothing
rollout/zero_std/count_<reward> | groups | groups that were generated and whose rewards all equal this value, kept or dropped
rollout/total_lengths | tokens | mean length of a sample, prompt and response
rollout/truncated | ratio | trajectories trained on that a length limit cut off
rollout/truncated_ratio | ratio | generated samples that a length limit cut off
rollout/masked_ratio | ratio | samples without a single trainable token; they keep their place in the average with weight 0
rollout/failed_ratio | ratio | generated samples that failed, by their status
rollout/aborted_ratio | ratio | generated samples that were stopped from outside
rollout/response_len/<statistic> | tokens | response length over generated samples: `mean`, `median`, `min`, `max`
rollout/prompt_len/<statistic> | tokens | prompt length over generated samples: `mean`, `median`, `min`, `max`
rollout/num_<what> | count | how many `groups`, `samples`, `tokens` (response tokens) finished, and how many groups were `put_back` (surplus, generated again later), `failed_groups` or `aborted_groups`
rollout/generated_reward | reward | mean reward over generated samples, also of groups that the dynamic sampling filter dropped
rollout/reward_<verdict> | ratio | generated samples that a built-in grader found `unparseable` (no answer), or on which it ran into `timeout` or `crashed`; their reward is 0
rollout/dynamic_filter/drop_<reason> | groups | groups the dynamic sampling filter dropped, by the reason it gave
rollout/error_cat/<category> | samples | samples whose reward or generation failed, by category
rollout/log_probs | nats | mean log-prob of the trained tokens under the policy before the step (trajectory mean)
rollout/ref_log_probs | nats | the same under the reference
rollout/rollout_log_probs | nats | the same as the engine sampled them
rollout/entropy | nats | mean entropy of the policy at the trained tokens before the step
rollout/repetition_frac | ratio | responses whose last 10,000 characters compress more than tenfold
rollout/prefix_cache_hit_rate | ratio | prompt tokens that an engine took from its prefix cache
staleness/<statistic> | versions | trainer version minus the version of the oldest trainable token, over samples: `mean`, `max`
multi_turn/<statistic> | turns | turns of a trajectory: `mean`, `max`
passrate/pass@<k> | ratio | probability that one of k samples of a prompt has reward 1
train/loss | loss | the loss that was minimised: policy loss plus KL and minus entropy terms, mean over the optimizer steps
train/pg_loss | loss | the policy-gradient part of it
train/entropy_loss | nats | mean entropy of the policy in the step (trajectory mean); the bonus is its product with --entropy-coef
train/pg_clipfrac | ratio | tokens whose clipped branch was the larger loss, so that they had no gradient (trajectory mean)
train/pg_clipfrac_lower | ratio | tokens on which the dual clip acted (trajectory mean)
train/ppo_kl | nats | mean of old log-prob minus log-prob (k1, trajectory mean): how far the policy moved within the rollout
train/ratio_max | 1 | largest probability ratio of a trained token
train/kl_loss | nats | mean KL estimate to the reference (--kl-loss-type, trajectory mean), before its coefficient
train/sft_loss | nats | mean negative log-prob of the supervised tokens over the global batch
train/accuracy | ratio | supervised tokens that were the most probable one
train/train_rollout_logprob_abs_diff | nats | mean over tokens under mask 1 of abs(trainer log-prob - engine log-prob), per trajectory, then over the batch; before the first optimizer step on the rollout
train/train_rollout_logprob_abs_diff/<p99-max> | nats | 99th percentile (`p99`) and maximum (`max`) of it over all those tokens
train/train_rollout_logprob_abs_diff_<p99-max> | nats | the same figures under flat names
train/grad_norm | 1 | norm of the gradient before clipping, mean over the optimizer steps
train/lr-pg_<group> | 1 | learning rate of an optimizer parameter group at the last step
train/global_batch_size | trajectories | trajectories per optimizer step, the constant the loss is averaged over
train/num_<what> | count | how many `steps`, `micro_batches` or `tokens` the training on the rollout took
train/step | steps | optimizer steps since the start of the run
train/policy_version | version | version of the weights that generated the rollout
train/weight_sync_version | version | version the engines had after the weight sync
eval/<set> | reward | mean reward over the held-out set; for 0/1 rewards the accuracy
eval/<set>-truncated_ratio | ratio | held-out responses that a length limit cut off
eval/<set>-failed_ratio | ratio | held-out samples without a score, counted as reward 0
eval/<set>-reward_<verdict> | ratio | held-out samples whose grading ended `unparseable`, `timeout` or `crashed`
eval/<set>-response_len/<statistic> | tokens | response length in the set: `mean`, `median`, `min`, `max`
eval/<set>-pass@<k> | ratio | probability that one of k samples of a held-out prompt has reward 1
eval/<set>-num_<what> | count | `prompts` or `samples` of the set
perf/step_time | s | wall time of the step; exactly the sum of all stages and perf/other_time
perf/other_time | s | the part of the step that no stage claims
perf/<stage>_time | s | wall time of a stage of the step: rollout, make_batch, train, update_weights, save_model, eval, …; nested stages count once, in the inner one
perf/train/<part>_time | s | part of the train stage, as the trainer's slowest rank measured it
perf/update_weights/<part>_time | s | part of the weight sync: pause, transfer, verify, resume
perf/<stage>_bytes | bytes | bytes moved by a stage
perf/tokens_per_gpu_per_sec | tokens/s | response tokens per engine device and second of the rollout stage, rewards included
perf/actor_train_tok_per_s | tokens/s | tokens (prompt and response) per second of the train stage, over all ranks
perf/peak_rss_gib | GiB | largest resident memory of a process of the run so far
perf/peak_device_memory_gib | GiB | largest device memory a training rank allocated in the step
"""  # noqa: E501


def _parse(table: str) -> tuple[Metric, ...]:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    return tuple(Metric(name, unit, definition) for name, unit, definition in rows)


METRICS: tuple[Metric, ...] = _parse(_TABLE)


@functools.cache
def _pattern() -> re.Pattern[str]:
    # "<p99-max>" lists its only values; any other placeholder takes one part of a name.
    parts = []
    for metric in METRICS:
        literal = re.split(r"(<[^>]*>)", metric.name)
        parts.append("".join(_placeholder(p) if p.startswith("<") else re.escape(p) for p in literal))
    return re.compile("|".join(parts))


def _placeholder(text: str) -> str:
    values = text[1:-1].split("-")
    return "(?:" + "|".join(map(re.escape, values)) + ")" if len(values) > 1 else "[^/]+"


def is_defined(name: str) -> bool:
    """Whether the table has the name, or it is a user's own (custom/...)."""
    return name.startswith(CUSTOM_PREFIX) or _pattern().fullmatch(name) is not None


def check_names(names: Iterable[str]) -> None:
    """Refuse metrics that nobody defined.

    Raises: UnknownMetric with each unknown name and the nearest defined one.
    """
    unknown = sorted(n for n in names if not is_defined(n))
    if unknown:
        known = [m.name for m in METRICS]
        hints = []
        for name in unknown:
            near = difflib.get_close_matches(name, known, n=1)
            hints.append(f"{name!r}" + (f" (nearest: {near[0]})" if near else ""))
        raise UnknownMetric(
            f"metrics without a definition: {', '.join(hints)}; add them to vime/observability/metrics.py, "
            f"or name those of your own functions {CUSTOM_PREFIX}<name>"
        )


def as_markdown() -> str:
    """docs/metrics.md: the table, section by section."""
    lines = [
        "# Metrics",
        "",
        "Generated from `vime/observability/metrics.py`; change it there.",
        "",
        "Every step is one line of `metrics.jsonl` in the run folder; `step` is the rollout's number and `time` the",
        "Unix time at its end. NaN and infinity are written as `null`. *Trajectory mean*: token mean inside each",
        "trajectory (siblings pooled), summed and divided by the constant global batch. Your own functions may emit",
        "`custom/<name>`.",
    ]
    section = ""
    for metric in METRICS:
        head = metric.name.split("/")[0]
        if head != section:
            section = head
            lines += ["", f"## {section}/", "", "| name | unit | definition |", "|---|---|---|"]
        lines.append(f"| `{metric.name}` | {metric.unit} | {metric.definition} |")
    return "\n".join(lines) + "\n"
