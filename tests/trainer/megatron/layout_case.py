"""What a row of the parallel matrix is made of: layout, model, loss, options, and the rollouts that it is trained on.

A layout is written as it is read: ranks along each dimension, their product is the number of processes. DP data, TP
tensor, TP2+SP with sequence parallel, PP pipeline, VP virtual stages on each pipeline rank, CP context, EP expert and
ETP expert tensor parallel (which share out the DP, CP and TP ranks anew). A layout says its DP where it is above 1.
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tests.trainer.conftest import SMALL, make_batch_of
from tests.trainer.megatron.routed_experts import random_experts, some_known
from vime.batch_columns import POLICY_VERSIONS
from vime.config.parallel import parallel_sizes
from vime.support import SamplingSupport
from vime.types import TrainBatch

_FLAGS = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}

# As `write_model` takes them; "deep" ones have layers for several virtual stages. Seeds of those with experts leave no
# token between two experts (`rank_cases.RoutingMargin`).
MODELS = {
    "qwen3": dict(kind="qwen3"),
    "qwen3 untied": dict(kind="qwen3", tied=False, seed=1),
    "qwen3 deep": dict(kind="qwen3", layers=4),
    "llama": dict(kind="llama", tied=False),
    "llama deep": dict(kind="llama", tied=False, layers=6),
    "qwen3 deeper": dict(kind="qwen3", layers=8),
    "llama tied": dict(kind="llama", seed=1),
    "qwen2": dict(kind="qwen2"),
    "moe": dict(kind="qwen3_moe", tied=False, seed=3),
    "moe deep": dict(kind="qwen3_moe", layers=4, seed=4),
    "moe mixed": dict(kind="qwen3_moe-mixed", layers=4, seed=2),  # one layer dense; weights not normalised
    "glm": dict(kind="glm4_moe", tied=False),  # a dense layer, then one with experts
    "glm deep": dict(kind="glm4_moe", tied=False, layers=4, seed=3),
    "glm groups": dict(kind="glm4_moe-groups", tied=False),  # experts in groups; no biases, no head norms
}

_KL = {"use_kl_loss": True, "kl_loss_coef": 0.05}
LOSSES = {
    "rl": {**_KL, "entropy_coef": 0.01},  # clipped policy loss, KL to a reference, entropy
    "sequences": {  # everything that needs the mean of a whole sequence, whichever ranks have its tokens
        "advantage_estimator": "gspo",
        "eps_clip": 0.01,
        "use_opsm": True,
        "opsm_delta": 0.15,
        "use_unbiased_kl": True,
        **_KL,
    },
    "kl in reward": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9, "eps_clip_c": 3.0},
    # The reference becomes the policy after each rollout, and is saved and read with it.
    "moving reference": {**_KL, "ref_update_interval": 1},
    # A teacher in the trainer, and rollouts of the version that was sent before the first, whose weights are kept.
    "taught": {"use_opd": True, "opd_kl_coef": 0.5, "keep_old_actor": True},
    "sft": {"loss_type": "sft_loss"},
    # Tokens that were sampled from a part of the vocabulary, as under top-p and top-k.
    "over a support": {**_KL, "entropy_coef": 0.01},
    # Weights and rejections by sequence for what the engine sampled otherwise, divisors of what is left.
    "corrected": {
        "use_tis": True,
        "tis_level": "geometric",
        "tis_clip": 1.15,
        "tis_clip_low": 0.7,
        "use_rs": True,
        "rs_lower_bound": 1e-3,
        "rs_veto_threshold": 0.2,
        **_KL,
    },
    "corrected and removed": {
        "use_tis": True,
        "tis_mode": "mask",
        "tis_clip": 3.0,
        "use_rs": True,
        "rs_lower_bound": 1e-3,
        "rejected_tokens": "removed",
        "advantage_estimator": "gspo",
        **_KL,
    },
    "own": {  # the loss of "rl" as a custom function
        "loss_type": "custom_loss",
        "custom_loss_function_path": "tests.trainer.megatron.hooks.same_loss",
        **_KL,
        "entropy_coef": 0.01,
    },
    # A critic with a head of its own beside the policy; the KL to a reference in the reward.
    "ppo": {"advantage_estimator": "ppo", "normalize_advantages": True, "gamma": 0.95, "kl_coef": 0.05},
}
CRITIC = {"lambd": 0.8, "value_clip": 0.1, "critic_lr": 5e-3, "critic_clip_grad": 0.5}

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OPTIONS = {
    "bf16": {"bf16": True},
    "recompute full": _FULL,
    "recompute selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "recompute experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]},
    "recompute spread": {**_FULL, "distribute_saved_activations": True},
    "recompute inside experts": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act", "shared_experts"],
    },
    "shared experts overlap": {"moe_shared_expert_overlap": True},
    "overlap grad reduce": {"overlap_grad_reduce": True, "bucket_size": 3000},
    "optimizer on the host": {"optimizer_cpu_offload": True},
    "overlap param gather": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000},
    "plain optimizer": {"use_distributed_optimizer": False},
    "outputs deallocated": {"deallocate_pipeline_outputs": True},
    "last stage of one layer": {"num_layers_in_last_pipeline_stage": 1},
    "embedding and loss count": {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    "stages spelt out": {"pipeline_model_parallel_layout": "E|tt|t|tL"},
    "stages without layers": {"pipeline_model_parallel_layout": "E||tttt|L"},
    "groups of three": {"microbatch_group_size_per_vp_stage": 3},
    "first rank of two layers": {"num_layers_in_first_pipeline_stage": 2},
    "vocabulary padded": {"make_vocab_size_divisible_by": 64},  # one rank's part is padding alone
}


@dataclass(frozen=True)
class Case:
    """One line of the table. Its name, `str(case)`, is unique."""

    layout: str
    model: str = "qwen3"
    option: str = ""
    loss: str = "rl"
    replay: str = ""
    """Of experts. "engine": routed ones come with the batches, for some tokens; "own": --use-routing-replay."""
    loads: str = ""
    """Goes on from the checkpoint of the case of this name, which lies above it, after its first rollout."""
    saves: bool = False
    exports: bool = False
    breaks: int | None = None
    """A rank whose gradient is spoilt at the end, which every rank must then name."""
    batches: tuple[TrainBatch, ...] = ()

    def __str__(self) -> str:
        loss = "" if self.loss == "rl" else self.loss
        more = (self.replay and f"replay {self.replay}", self.loads and f"from {self.loads}")
        return " ".join(filter(None, (self.layout, self.model, self.option, loss, *more)))

    @property
    def megatron(self) -> dict[str, object]:
        """Megatron's settings."""
        flags: dict[str, object] = {"sequence_parallel": True} if "+SP" in self.layout else {}
        sizes = {name: int(size) for name, size in re.findall(r"\b([A-Z]+)(\d+)", self.layout)}
        return {**flags, **{_FLAGS[n]: s for n, s in sizes.items() if n != "DP"}, **OPTIONS.get(self.option, {})}

    @property
    def world_size(self) -> int:
        """Processes."""
        return math.prod(int(size) for _, size in re.findall(r"\b(DP|TP|PP|CP)(\d+)", self.layout))

    @property
    def reference(self) -> "Case":
        """What one process computes, to compare with."""
        return Case("one process", self.model, loss="rl" if self.loss == "own" else self.loss, replay=self.replay)


LENGTHS = [9, 4, 17, 6, 5, 12, 8, 7]


def with_batches(case: Case, world_size: int) -> Case:
    """The case with its three rollouts: one step, two steps (old log-probs), one that leaves a rank without samples."""
    sizes = parallel_sizes(case.megatron)
    dp, multiple = sizes.data(world_size), sizes.stages.micro_batch_multiple
    batches = [
        make_batch_of(LENGTHS, dp=dp, micro=3),
        make_batch_of(LENGTHS, dp=dp, micro=1, steps=2, seed=1),
        make_batch_of([5, 6, 7], seed=2),
    ]
    batches = [replace(b, steps=tuple(_with_multiple(_dealt(step, dp), multiple) for step in b.steps)) for b in batches]
    if case.loss == "taught":
        batches = [replace(b, is_older=True, extra=b.extra | {POLICY_VERSIONS: some_versions(b)}) for b in batches]
    if case.loss == "over a support":
        batches = [replace(batch, support=some_support(batch)) for batch in batches]
    for batch in batches:
        if case.loss == "ppo":  # some episodes are cut off, a tool has spoken in some
            batch.truncated[1::3] = True
            batch.loss_mask[batch.cu_seqlens[1::2] - 2] = 0
        batch.advantages[:] += 1  # a loss that is not what two larger numbers leave of each other
        batch.rewards[:] = batch.advantages  # what a critic learns of
    if case.replay == "engine":
        sizes = {
            "layers": MODELS[case.model].get("layers", 2),
            "experts": 8,
            "top_k": 4 if "groups" in case.model else 2,
        }
        batches = [
            replace(b, routed_experts=random_experts(b, **sizes, known=some_known(b), seed=k))
            for k, b in enumerate(batches)
        ]
    return replace(case, batches=tuple(batches))


def some_versions(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """Of each token 1; of every third an unknown one."""
    return np.where(np.arange(len(batch.tokens)) % 3, 1, -1)


def some_support(batch: TrainBatch, most: int = 30, vocab: int = SMALL["vocab_size"]) -> SamplingSupport:
    """Of each token but every fifth, which has all of them: its own and some others, less than half of all."""
    g = np.random.default_rng(int(batch.tokens.sum()))
    ids = [
        np.unique([token, *g.choice(vocab, g.integers(0, most), replace=False)]) if t % 5 else []
        for t, token in enumerate(batch.tokens)
    ]
    return SamplingSupport(np.concatenate(ids).astype(np.int32), np.cumsum([0, *map(len, ids)]))


def _dealt(step, dp):
    """The plan of a step over `dp` ranks, where it is for fewer."""
    if len(step) == dp:
        return step
    samples = [i for rank in step for micro in rank for i in micro]
    count = -(-len(samples) // dp)
    return tuple(tuple(tuple(samples[i : i + 1]) for i in range(d, dp * count, dp)) for d in range(dp))


def _with_multiple(step, multiple):
    """Empty micro-batches up to a multiple, as virtual stages need."""
    count = -(-len(step[0]) // multiple) * multiple
    return tuple((*rank, *[()] * (count - len(rank))) for rank in step)
