"""Every metric that vime writes: name, unit, definition. A name that is not here is refused.

docs/metrics.md is `as_markdown()`. Names are upstream's where upstream has the quantity. In a name, <x> stands for some
text and {a,b} for one of these words.
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
rollout/raw_reward | reward | mean reward of the groups trained on, over trajectories, as the reward function gave it
rollout/raw_reward/{min,max} | reward | smallest and largest of them (`min`, `max`)
rollout/generated_reward | reward | mean reward of all generated samples, those of dropped groups included
rollout/rewards | reward | mean over trajectories of the reward after the estimator's normalisation; about 0 when groups are centred
rollout/advantages | 1 | mean advantage over trajectories; with --advantage-estimator ppo over the trainable tokens, as the loss gets them
rollout/advantages/{min,max} | 1 | smallest and largest of them
rollout/advantages/std | 1 | with ppo: their standard deviation (n)
rollout/{values,returns} | reward | with ppo: mean over the trainable tokens of the critic's values before it was trained on the rollout, and of what they are trained towards
rollout/{rollout_log_probs,log_probs,ref_log_probs} | nats | mean log-prob of the trainable tokens under the engine, the trainer before its first update, and the reference; per trajectory, then over the batch
rollout/kl | nats | KL of the policy before the step to the reference under --kl-coef (--kl-loss-type, trajectory mean), before its coefficient
rollout/overlong_penalty | reward | mean over trajectories of what --overlong-buffer-len adds to the reward, 0 or less
rollout/zero_std | ratio | groups trained on whose trajectories all have the same reward, so that they teach nothing
rollout/zero_std/count_<reward> | groups | generated groups, kept or dropped, whose rewards all equal this value
rollout/total_lengths | tokens | mean length of a sample trained on, prompt and response
rollout/truncated | ratio | trajectories trained on that a length limit cut off
rollout/masked_ratio | ratio | samples without a single trainable token; they keep their place in the average with weight 0
rollout/truncated_ratio | ratio | generated samples that a length limit cut off
rollout/failed_ratio | ratio | generated samples that failed
rollout/reward_<verdict> | ratio | generated samples whose grading ended without a judgement, by verdict
rollout/reward/<part> | reward | mean of one entry of dict rewards over generated samples: a part of --rm-parts and `total`, or what the reward function named so
rollout/remote_rm/{requests,retries,failed_samples,breaker_openings} | count | what was asked of the reward server since the last rollout, evaluation included: requests sent, further tries of a sample, samples given up, and how often its repeated failures made requests pause
rollout/remote_rm/{latency_mean,latency_max} | s | from sending a request to the reward server to its answer, over requests that were answered
rollout/response_len/<statistic> | tokens | response length over generated samples: `mean`, `median`, `min`, `max`
rollout/prompt_len/<statistic> | tokens | prompt length over generated samples: `mean`, `median`, `min`, `max`
rollout/correct_length/<statistic> | tokens | response length over the samples trained on with a reward of at least 1: `mean`, `median`, `min`, `max`
rollout/repetition_frac | ratio | samples trained on whose last 10,000 characters zlib (level 1) makes more than ten times shorter
rollout/prefix_cache_hit_rate | ratio | prompt tokens the engines found in their prefix cache, of those they looked for
rollout/avg_cached_tokens_per_sample | tokens | prompt tokens found in the prefix cache, per response the engines ended
rollout/num_<what> | count | what the rollout took: `groups`, `samples`, `tokens` (response tokens), `learnt_tokens` (of supervised data: those under mask 1), `failed_groups`, `aborted_groups`; `put_back`: groups returned to the buffer, `put_back_tokens`: tokens they keep (--partial-rollout), `continued_groups`: groups begun in an earlier rollout, `reused_groups`: groups that were finished before the run was resumed, `offpolicy_tokens`: tokens of the groups trained on that earlier rollouts sampled; `preemptions`: requests an engine set back for want of cache
rollout/teacher/{requests,retries} | requests | asked of --opd-teacher-url for the rollout's samples, and those of them that repeated one that failed
rollout/teacher/seconds | s | until it had scored all of them; part of the rollout's time
rollout/dynamic_filter/drop_<reason> | groups | groups the dynamic sampling filter dropped, by the reason it gave
rollout/retries | count | requests to the engines that were sent again since the last rollout, because a connection, an engine or the router failed; evaluation included
rollout/{engine_restarts,router_restarts} | count | engines that were started again since the last rollout and serve, and routers (docs/failures.md)
rollout/error_cat/<category> | samples | samples whose generation or reward failed, by category
data/epoch | epochs | prompts handed out so far, in epochs (docs/data.md says what an epoch of a mixture is)
data/num_<what> | count | `prompts`: in an epoch; `dropped_prompts`: left out at the start for their length; `buffered_groups`: put back and waiting; `discarded_groups`: thrown away by the buffer filter since the start of the run
multi_turn/round_number/<statistic> | turns | times the policy had the word in a sample trained on (runs of mask 1): `mean`, `median`, `min`, `max`; multi_turn/ is there when somebody else wrote into a response
multi_turn/raw_response_length/<statistic> | tokens | response length, tool and environment tokens included
multi_turn/wo_obs_response_length/<statistic> | tokens | the policy's own tokens alone (mask 1)
passrate/pass@<k> | ratio | probability that one of k trajectories of a prompt trained on has reward 1; where all rewards are 0 or 1. A dynamic filter has chosen the prompts before
staleness/{mean,max} | versions | policy version the trainer holds minus that of a sample's oldest trainable token, over samples trained on
stream/{generating,scoring,finished}_groups/{mean,max} | groups | --fully-async: groups that are being generated (or wait for a place), are being scored, and are finished and wait for the trainer: mean over the time from one rollout's being taken to the next, and the most at a time
stream/versions_ahead | versions | how far behind the trainer that gets it a group begun now may be: --max-staleness, less while whole rollouts would lie finished
stream/dropped_stale_groups | groups | finished groups that were older than --max-staleness when the trainer could have had them: left out, and their prompts generated anew
stream/masked_stale_tokens | tokens | tokens of older versions of the groups trained on, from which the gradient was taken (--stale-groups mask, --mask-offpolicy-in-partial-rollout)
stream/continued_samples | samples | samples that were under way when the engines got new weights, and went on with these; one counts for each sync that it lived through
train/loss | loss | the loss that was minimised: policy loss plus KL and minus entropy terms; mean over the rollout's optimizer steps, as all train/ means
train/pg_loss | loss | the policy-gradient part of it; with sft_loss the negative log-prob of the supervised tokens (token mean)
train/entropy_loss | nats | entropy of the policy (trajectory mean); the bonus is its aggregation by --loss-agg-mode times --entropy-coef
train/pg_clipfrac | ratio | tokens whose clipped branch was the larger loss, so that they had no gradient; with cispo, whose weight was clipped (trajectory mean)
train/pg_clipfrac_{low,high} | ratio | those of them below the lower bound and above the upper
train/pg_clipfrac_dual | ratio | tokens of negative advantage whose loss --eps-clip-c limited, so that they had no gradient (trajectory mean)
train/opsm_clipfrac | ratio | tokens of negative advantage that --use-opsm left out, their sequence being too far from the policy that sampled it (trajectory mean)
train/tis | 1 | importance ratio exp(trainer's log-prob before the first step - engine's), of what --tis-level says, before the bounds (trajectory mean); with --use-tis
train/tis_abs | 1 | abs(that ratio - 1) (trajectory mean)
train/tis_clipfrac | ratio | tokens whose ratio was outside --tis-clip-low to --tis-clip, so that their weight is the bound, or 0 with --tis-mode mask (trajectory mean)
train/tis_clipfrac_{low,high} | ratio | those of them below the lower bound and above the upper
train/tis_weight | 1 | what the policy loss of a token was multiplied with, rejected tokens as 0 (trajectory mean); with --use-tis or --use-rs
train/rs_rejected | ratio | tokens that --use-rs rejected, by its bounds or by a veto (trajectory mean)
train/rs_vetoed | ratio | those of them in a sequence that one token rejected (--rs-veto-threshold)
train/ratio | 1 | exp(log-prob - old log-prob), with gspo that of the sequence (trajectory mean); 1 until the policy moves
train/ppo_kl | nats | old log-prob minus log-prob (k1, trajectory mean): how far the policy moved within the rollout, or since an earlier version sampled it
train/kl_loss | nats | KL estimate to the reference (--kl-loss-type, trajectory mean), before its coefficient; 0 without --use-kl-loss
train/opd_kl | nats | reverse KL to the teacher on the sampled tokens (--use-opd): old log-prob - the teacher's, trajectory mean, before its coefficient
train/old_actor_ratio | ratio | tokens under mask 1 whose old log-probs come from weights kept by --keep-old-actor; the others' are the engine's. In rollouts of an earlier version
train/reference_rollout | 1 | the rollout whose weights the reference is now (--ref-update-interval); -1 while it is what the run began with
train/train_rollout_logprob_abs_diff | nats | mean over tokens under mask 1 of abs(trainer log-prob - engine log-prob), per trajectory, then over the batch; before the first optimizer step on the rollout. Where the rollout is of an older version (staleness), the policy's move since is in it
train/train_rollout_logprob_abs_diff_{p99,max} | nats | 99th percentile (`p99`) and maximum (`max`) over all those tokens, exact over the global batch
train/train_rollout_k3_kl | nats | estimate of KL(engine, trainer) on the tokens the engine sampled: r - 1 - ln r with r = exp(trainer log-prob - engine log-prob), averaged as that difference is
train/train_rollout_ratio | 1 | that r, averaged alike; 1 in expectation, whatever the two are, so another mean says that large ratios are rare and missed
train/train_rollout_ess | ratio | effective sample size of importance sampling by tokens, as a share of them: (sum r)^2 / (n sum r^2)
train/train_rollout_sequence_ess | ratio | the same by whole samples, with the product of their tokens' r: the share of the batch that is left to who corrects whole sequences
train/routing_replay_differs | ratio | tokens whose experts, as the engine chose them, are not all those that the trainer's own router would choose where it stands: the layers before have replayed the engine's, too. Mean over the layers with experts; prompt and response tokens that were replayed, in the first pass over the rollout
train/routing_replay_differs/layer_<i> | ratio | the same of one decoder layer, counted from 0
train/routing_replay_missing | tokens | with --use-rollout-routing-replay: prompt and response tokens, of each sample all but the last, whose experts the engines did not report, so that the trainer's own router chooses them
train/routing_replay_missing_share | ratio | the part of those tokens that they are
train/grad_norm | 1 | norm of the gradient before clipping
train/critic-value_loss | loss | loss of the critic that was minimised: clipped squared error (trajectory mean) times --value-loss-coef
train/critic-value_clipfrac | ratio | tokens whose clipped error was the larger one, so that they had no gradient (trajectory mean)
train/critic-explained_variance | ratio | 1 - variance of (return - value) / variance of the returns, over the trainable tokens, before the critic's first step on the rollout: 1 foresees all, 0 is a constant's; not there where returns do not vary
train/critic-grad_norm | 1 | norm of the critic's gradient before clipping
train/critic-lr-pg_0 | 1 | learning rate of the critic at the last step
train/lr-pg_<group> | 1 | learning rate of an optimizer parameter group at the last step
train/step | steps | optimizer steps since the start of the run
train/tokens | tokens | prompt and response tokens trained on
train/global_batch_size | trajectories | trajectories per optimizer step, the constant the loss is averaged over
train/policy_version | version | version of the weights that generated the rollout: 1 + the rollouts they were trained on
weight_sync/seconds | s | pause to commit of the weight sync that ended the step
weight_sync/bytes | bytes | what it sent to each engine
weight_sync/buckets | count | in how many buckets
weight_sync/gb_per_second | GB/s | those bytes over weight_sync/seconds, in 10^9 bytes
weight_sync/<part>_seconds | s | of that time: `gather`: the trainer put buckets together and laid them out; and, on the slowest worker of an engine, `read`: waited for their bytes and copied them, `check`: computed checksums, `load`: loaded tensors. The trainer gathers a bucket while the engines load the one before
weight_sync/probe_seconds | s | of the probe, where one was due
weight_sync/probe_abs_diff_{mean,max} | nats | abs(trainer log-prob - engine log-prob) over the probe's greedy tokens
eval/<set> | reward | mean reward over the held-out set; for 0/1 rewards the accuracy
eval/<set>-stderr | reward | standard error of that mean over the set's prompts, from the sample standard deviation (n-1) of the prompts' own means; not there for a single prompt
eval/<set>-truncated_ratio | ratio | held-out responses that a length limit cut off
eval/<set>-failed_ratio | ratio | held-out samples without a score, counted as reward 0
eval/<set>-reward_<verdict> | ratio | held-out samples whose grading ended without a judgement, by verdict
eval/<set>-reward/<part> | reward | mean of one entry of dict rewards over the held-out set
eval/<set>-response_len/<statistic> | tokens | response length in the set: `mean`, `median`, `min`, `max`
eval/<set>-pass@<k> | ratio | probability that one of k trajectories of a held-out prompt has a reward of at least 1
eval/<set>-num_<what> | count | `prompts` or `samples` of the set; `dropped_prompts`: those longer than --eval-max-prompt-len
perf/step_time | s | wall time of the step, from the end of the one before it: the sum of its stages and perf/other_time. A step that evaluates or saves holds that, too
perf/step_time_without_eval_and_save | s | perf/step_time less perf/eval_time, perf/save_model_time and perf/save_hf_time: what compares from step to step, and what the shares below are of
perf/wait_time_ratio | ratio | share of that in which the trainer was not asked to train: rollout, weight sync, batch, logging. 0.5 says only that they take as long as training
perf/trainer_compute_ratio | ratio | share of it in which the trainer computed: log_probs, ref_log_probs and those of other weights, values, actor_train and critic_train
perf/engine_busy_ratio | ratio | share of it in which at least one request of the rollout was under way at any engine
perf/engine_busy_s | s | time in which at least one request of the rollout was under way, as the client sees it
perf/engine_running_requests | requests | mean over the rollout and the engines of the requests an engine was computing (vLLM's running phase)
perf/tokens_per_gpu_per_sec | tokens/s | tokens the engines sampled for the rollout, those of dropped and aborted groups too, per second of the rollout (rewards included) and engine device
perf/effective_tokens_per_gpu_per_sec | tokens/s | the same of tokens that are trained on (mask 1) alone
perf/longest_sample_tokens_per_sec | tokens/s | length of the longest response trained on, per second of the rollout
perf/longest_sample_tokens_per_sec_without_non_generation | tokens/s | the same, without the seconds that sample spent outside generation
perf/non_generation_time/<statistic> | s | time a sample trained on spent in spans that its functions added (tools, environments; observability/trace.py): `mean`, `median`, `min`, `max`
perf/sample_seconds/{waiting,generate,reward,filter,queued}/<statistic> | s | time that samples trained on waited for a place, were generated (their whole group's request, or their generate function), graded, filtered, and with --fully-async waited for the trainer, over those that did: `mean`, `median`, `min`, `max`
perf/request_latency/{queue,prefill,decode,total,first_token} | s | mean over the rollout's responses, from vLLM's own counters: in its queue, from scheduling to the first token, from the first to the last, from arrival to the last, from arrival to the first
perf/other_time | s | the part of the step that no stage claims
start/<part>_s | s | with the first step: what the driver waited for from the program's start to that step: `settings`, `imports`, `data`, `ray`, `engines`, `trainer`, `resume`, then the first weight sync and evaluation (`update_weights`, `eval`, and the turns of shared devices); `other` is the rest. Engines and trainer start beside the driver: only the wait that is left is theirs
start/total_s | s | their sum
perf/<stage>_time | s | wall time of a stage of the step: rollout (train.py), make_batch, train, save_model, save_hf, update_weights, eval, and to_training and to_generation where trainer and engines take turns on the same devices; a stage inside another counts once, in the inner one
perf/{sleep,wake,offload,onload}_time | s | where trainer and engines take turns on the same devices: the engines free them and take them again, the trainer leaves and comes back. Part of perf/to_training_time, perf/update_weights_time and perf/to_generation_time
perf/rollout_wait_time | s | train_async.py: a stage, in which the trainer waited for generation: for the rollout of the step, or before a weight sync or an evaluation for the next one
perf/rollout_pause_time | s | --fully-async: a stage, in which the trainer waited until the requests under way had been answered, for a weight sync
perf/rollout_s | s | train_async.py: what the generation of the step's rollout took, most of it beside the training in the step before
perf/rollout_ready_s | s | train_async.py: how long that rollout then waited for the trainer; beside perf/rollout_wait_time it says which of the two is the slower one
perf/critic_apart_{values,train}_time | s | seconds that a critic on devices of its own computed values, and trained, beside the policy's parts of perf/train_time
perf/<part>_time | s | part of perf/train_time, not a stage beside it: log_probs, ref_log_probs, old_actor_log_probs (--keep-old-actor), teacher_log_probs (a teacher in the trainer), actor_train (forward, backward and update); with a critic values and critic_train, the same of it
perf/actor_train_tok_per_s | tokens/s | prompt and response tokens trained on per second of actor_train, all ranks together
perf/{log_probs,ref_log_probs,actor_train}_tflops | TFLOP/s | operations of the model per second and training device: its matrix products, 2 a multiply-add, attention as causal; a backward pass counts two forward ones, what is computed twice counts once
perf/actor_train_mfu | ratio | perf/actor_train_tflops over the device's dense 16-bit peak, where that is known (NVIDIA's data sheets; not on a CPU, not in float32)
memory/driver_rss_bytes | bytes | host memory of the driver at the end of the step (resident set, shared pages included)
memory/trainer_rss_bytes | bytes | host memory of training rank 0 at the end of its training
memory/trainer_device_peak_bytes | bytes | most device memory that torch held on rank 0 since the step before (CUDA)
memory/device_used_in_{training,sync,generation}_bytes | bytes | device memory in use, by whatever process, when trainer and engines had changed places; the fullest training rank's
memory/engine_rss_bytes | bytes | host memory of the largest engine server after the rollout, where vLLM reports it
"""  # noqa: E501


def _parse(table: str) -> tuple[Metric, ...]:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    return tuple(Metric(name, unit, definition) for name, unit, definition in rows)


METRICS: tuple[Metric, ...] = _parse(_TABLE)
TRAIN_PARTS = frozenset(
    {f"{policy}log_probs" for policy in ("", "ref_", "old_actor_", "teacher_")}
    | {"values", "actor_train", "critic_train"}
)
"""The trainer's own times, which perf/train_time contains."""


# Placeholders filled with users' own words (names of sets, a filter's reasons), which may hold slashes.
_FREE_TEXT = frozenset({"<set>", "<part>", "<reason>", "<category>"})


@functools.cache
def _pattern() -> re.Pattern[str]:
    return re.compile("|".join("".join(map(_part, re.split(r"(<[^>]*>|{[^}]*})", m.name))) for m in METRICS))


def _part(text: str) -> str:
    if text.startswith("{"):
        return "(?:" + "|".join(map(re.escape, text[1:-1].split(","))) + ")"
    if text.startswith("<"):
        return ".+" if text in _FREE_TEXT else "[^/]+"
    return re.escape(text)


def is_defined(name: str) -> bool:
    """Whether the table has the name, or it is a user's own (custom/...)."""
    return name.startswith(CUSTOM_PREFIX) or _pattern().fullmatch(name) is not None


def name_problem(name: str) -> str | None:
    """What is wrong with a metric's name, in words that follow it; None for one that is defined."""
    if is_defined(name):
        return None
    near = _nearest(name)
    return "which is no metric; " + (f"did you mean {near}?" if near else "docs/metrics.md lists them")


def _nearest(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, [m.name for m in METRICS], n=1)), None)


def check_names(names: Iterable[str]) -> None:
    """Refuse metrics that nobody defined.

    Raises: UnknownMetric with each unknown name and the nearest defined one.
    """
    if unknown := sorted(n for n in names if not is_defined(n)):
        hints = [f"{name!r}" + (f" (nearest: {near})" if (near := _nearest(name)) else "") for name in unknown]
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
        "`custom/<name>`. In a name, `<x>` stands for some text and `{a,b}` for one of these words.",
    ]
    section = ""
    for metric in METRICS:
        head = metric.name.split("/")[0]
        if head != section:
            section = head
            lines += ["", f"## {section}/", "", "| name | unit | definition |", "|---|---|---|"]
        lines.append(f"| `{metric.name}` | {metric.unit} | {metric.definition} |")
    return "\n".join(lines) + "\n"
