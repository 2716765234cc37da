"""The settings of PPO's critic, a section beside those of `vime.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.schema import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic of PPO and the advantages made of its values; read with --advantage-estimator ppo alone."""

    critic_num_nodes: int | None = setting(
        None,
        "nodes with devices of the critic's own; default: 1 with --critic-num-gpus-per-node, else the critic takes "
        "turns with the policy on the training devices",
    )
    critic_num_gpus_per_node: int | None = setting(
        None,
        "the critic's own devices per node (on the CPU platform, processes); default: with --critic-num-nodes as many "
        "as --actor-num-gpus-per-node",
    )
    critic_tensor_model_parallel_size: int | None = setting(
        None, "of the critic on devices of its own, with sequence parallel where above 1; default: the policy's layout"
    )
    critic_pipeline_model_parallel_size: int | None = setting(
        None, "of the critic on devices of its own, its layers cut evenly; default: the policy's layout"
    )
    critic_context_parallel_size: int | None = setting(
        None, "of the critic on devices of its own; default: the policy's"
    )
    critic_load: str | None = setting(
        None, "HF checkpoint the critic starts from, with or without a value head (score.weight); default: the policy's"
    )
    critic_lr: float | None = setting(None, "the critic's learning rate; default: --lr")
    critic_lr_warmup_iters: int = setting(0, "optimizer steps of its linear warm-up")
    critic_clip_grad: float | None = setting(None, "norm its gradient is clipped to; default: --clip-grad")
    critic_weight_decay: float | None = setting(None, "its weight decay; default: --weight-decay")
    num_critic_only_steps: int = setting(0, "rollouts, from the first of the run, that train the critic alone")
    lambd: float = setting(1.0, "GAE's lambda, 0 to 1: 0 trusts the values alone, 1 the rewards alone")
    value_clip: float = setting(0.2, "how far a value may move within a rollout, in the reward's unit; 0: no clip")
    value_loss_coef: float = setting(1.0, "coefficient of the squared error; 0.5 is that of verl and OpenRLHF")
    gae_masked_tokens: str = setting(
        "skip",
        "tokens under mask 0 between sampled ones. skip: no steps; zero: steps of reward and value 0 (OpenRLHF); all: "
        "steps like the others (slime)",
        choices=("skip", "zero", "all"),
    )
    disable_truncation_bootstrap: bool = setting(
        False, "take a response that a length limit cut off as ended, as slime and verl do: no value behind it"
    )
