"""Every place where a user's function or class may be put in: flag, parameters, what it gives back, when it is called.

The checks at start, the loading and the table in docs/customization.md come from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vime.config import Config
from vime.config.hooks import UserFunction, check_class, load_hook
from vime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One row."""

    key: str
    """The setting with its dotted path, as "section.field"."""
    kind: str
    """"function", "async" (awaited), "either" of these or "class" (called once to build an object)."""
    parameters: tuple[str, ...]
    """Positional arguments of the call, in order."""
    keywords: tuple[str, ...] = ()
    """Arguments passed by name."""
    optional: tuple[str, ...] = ()
    """Arguments passed by name if the function takes them."""
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a class: the methods that will be called, with their positional arguments."""
    returns: str
    """The type, as in the signature."""
    called: str
    """When, and on which process where that is not the driver."""

    @property
    def flag(self) -> str:
        """As users write it."""
        return "--" + self.key.split(".")[1].replace("_", "-")

    def paths(self, config: Config) -> list[str]:
        """The dotted paths that a run names, in their order."""
        section, name = self.key.split(".")
        value = getattr(getattr(config, section), name)
        if value is None:
            return []
        if isinstance(value, dict):  # weighted parts, built-ins among them
            return [path for path in value if "." in path]
        return list(value) if isinstance(value, list) else [value]

    def signature(self) -> str:
        """`async (config, sample) -> float`, for people."""
        arguments = [*self.parameters, *(f"*, {k}" if i == 0 else k for i, k in enumerate(self.keywords))]
        arguments += [f"[{k}]" for k in self.optional]
        prefix = {"async": "async ", "either": "[async] ", "class": "class "}.get(self.kind, "")
        return f"{prefix}({', '.join(arguments)}) -> {self.returns}"


_ROLLOUT = ("config", "rollout_id", "data_source", "engines")

HOOKS: tuple[Hook, ...] = (
    Hook(
        key="rollout.rollout_function_path",
        kind="function",
        parameters=_ROLLOUT,
        keywords=("evaluation",),
        returns="RolloutResult",
        called="once per rollout; makes all of its groups",
    ),
    Hook(
        key="rollout.eval_function_path",
        kind="function",
        parameters=_ROLLOUT,
        keywords=("evaluation",),
        returns="RolloutResult",
        called="once per evaluation, with the named held-out sets as `data_source`",
    ),
    Hook(
        key="rollout.custom_generate_function_path",
        kind="async",
        parameters=("config", "sample", "sampling_params"),
        optional=("evaluation",),
        returns="Sample | list[Sample]",
        called="once per sample, side by side",
    ),
    Hook(
        key="rollout.rollout_sample_hook_path",
        kind="function",
        parameters=("config", "sample"),
        keywords=("rollout_id", "evaluation"),
        returns="Sample | None",
        called="on each generated sample before its reward; several run in the order given",
    ),
    Hook(
        key="reward.custom_rm_path",
        kind="either",
        parameters=("config", "sample"),
        returns="float | dict[str, float]",
        called="once per sample; with --group-rm once per group with its samples, for a list; a plain function in a "
        "grader process",
    ),
    Hook(
        key="reward.rm_parts",
        kind="either",
        parameters=("config", "sample"),
        returns="float",
        called="once per sample, as a part of the sum; a plain function in a grader process",
    ),
    Hook(
        key="data.data_source_path",
        kind="class",
        parameters=("config", "tokenizer"),
        methods={
            "get_groups": ("n",),
            "put_back": ("groups",),
            "state": (),
            "restore": ("state",),
            "epoch_size": (),
            "begin_rollout": ("config", "rollout_id"),
            "metrics": (),
        },
        returns="DataSource",
        called="once, before training, with the settings (a `vime.config.Config`) and the tokenizer",
    ),
    Hook(
        key="data.buffer_filter_path",
        kind="function",
        parameters=("config", "rollout_id", "buffer", "n"),
        returns="list[Group]",
        called="when groups are asked for while some wait that were put back; what it takes out of `buffer` without "
        "returning it is discarded",
    ),
    Hook(
        key="rollout.dynamic_sampling_filter_path",
        kind="function",
        parameters=("config", "samples"),
        returns="bool | FilterOutput",
        called="on each scored group; one that is not kept is replaced",
    ),
    Hook(
        key="rollout.rollout_sample_filter_path",
        kind="function",
        parameters=("config", "groups"),
        returns="None",
        called="on the groups to be trained on; marks samples by `remove_sample`",
    ),
    Hook(
        key="rollout.rollout_all_samples_process_path",
        kind="function",
        parameters=("config", "all_groups", "data_source"),
        returns="None",
        called="after a rollout, on all groups that ended: kept, dropped and failed",
    ),
    Hook(
        key="rollout.custom_convert_samples_to_train_data_path",
        kind="function",
        parameters=("config", "samples"),
        returns="dict[str, ndarray]",
        called="once per rollout; makes the columns of the batch in place of `sample_columns`",
    ),
    Hook(
        key="reward.custom_reward_post_process_path",
        kind="function",
        parameters=("config", "samples"),
        returns="tuple[list[float], list[float]]",
        called="once per rollout; raw rewards, and advantages in place of the estimator's",
    ),
    Hook(
        key="algo.custom_pg_loss_reducer_function_path",
        kind="function",
        parameters=("config", "loss_mask", "cu_seqlens", "trajectory_ids", "global_batch_size"),
        returns="ndarray",
        called="once per rollout; the weight of each token's policy loss",
    ),
    Hook(
        key="algo.custom_advantage_function_path",
        kind="function",
        parameters=("config", "batch"),
        returns="ndarray",
        called="on every training rank, once per rollout, when the old log-probs are known",
    ),
    Hook(
        key="rollout.rollout_data_postprocess_path",
        kind="function",
        parameters=("config", "rollout_id", "batch"),
        returns="TrainBatch | None",
        called="on every training rank, once per rollout, after the advantages",
    ),
    Hook(
        key="algo.custom_loss_function_path",
        kind="function",
        parameters=("config", "inputs", "sum_of_sample_mean"),
        returns="tuple[Tensor, dict[str, float]]",
        called="on every training rank, once per micro-batch, with --loss-type custom_loss",
    ),
    Hook(
        key="algo.custom_tis_function_path",
        kind="function",
        parameters=("config", "inputs"),
        returns="tuple[Tensor, dict[str, float]]",
        called="on every training rank, once per micro-batch, with --use-tis",
    ),
    Hook(
        key="train.custom_model_provider_path",
        kind="function",
        parameters=("config", "pre_process", "post_process", "build"),
        returns="PolicyModel",
        called="on every training rank; makes the policy; a reference takes its modules, too",
    ),
    Hook(
        key="train.custom_megatron_init_path",
        kind="function",
        parameters=("config",),
        returns="None",
        called="on every training rank, after the process groups, before the model",
    ),
    Hook(
        key="train.custom_megatron_before_log_prob_hook_path",
        kind="function",
        parameters=("config", "model", "store_prefix"),
        returns="None",
        called="on every training rank, before log-probs of the policy, or under other weights (`ref_` and so on)",
    ),
    Hook(
        key="train.custom_megatron_before_train_step_hook_path",
        kind="function",
        parameters=("config", "rollout_id", "step_id", "model", "optimizer", "scheduler"),
        returns="None",
        called="on every training rank, before each optimizer step",
    ),
    Hook(
        key="sync.custom_update_weight_post_write_path",
        kind="function",
        parameters=("config", "path", "version"),
        returns="None",
        called="on the rank that sends, after each bucket file of --update-weight-transport disk",
    ),
    Hook(
        key="rollout.custom_rollout_log_function_path",
        kind="function",
        parameters=("config", "rollout_id", "groups", "metrics", "seconds"),
        returns="bool | None",
        called="after a rollout; may add to `metrics`; True leaves out the rollout's own",
    ),
    Hook(
        key="rollout.custom_eval_rollout_log_function_path",
        kind="function",
        parameters=("config", "rollout_id", "groups", "metrics"),
        returns="bool | None",
        called="after an evaluation; may add to `metrics`; True leaves out the evaluation's own",
    ),
)


def hook(key: str) -> Hook:
    """The row of a setting, by "section.field"."""
    return next(row for row in HOOKS if row.key == key)


def load_all(config: Config, key: str) -> list[UserFunction]:
    """The functions that a run names by this setting, checked. Raises: ConfigError."""
    row = hook(key)
    return [_load(row, path, config) for path in row.paths(config)]


def load(config: Config, key: str) -> UserFunction | None:
    """The function that a run names by this setting, if it does. Raises: ConfigError."""
    functions = load_all(config, key)
    return functions[0] if functions else None


def load_path(config: Config, key: str, path: str) -> UserFunction:
    """A function that a sample names by itself in place of the setting's. Raises: ConfigError."""
    return _load(hook(key), path, config)


def problems(config: Config) -> Iterator[str]:
    """What is wrong with any of them: not importable, not callable, other parameters than it is called with."""
    for row in HOOKS:
        for path in row.paths(config):
            try:
                _load(row, path, config)
            except ConfigError as error:
                yield from error.problems


def as_markdown() -> str:
    """The table of docs/customization.md."""
    lines = ["| flag | signature | called |", "|---|---|---|"]
    for row in HOOKS:
        signature = row.signature().replace("|", "\\|")
        lines.append(f"| `{row.flag}` | `{signature}` | {row.called} |")
    return "\n".join(lines) + "\n"


def _load(row: Hook, path: str, config: Config) -> UserFunction:
    try:
        function = load_hook(
            path,
            _parameters(row, config),
            keywords=row.keywords,
            is_async=row.kind == "async",
            is_plain=row.kind == "function",
        )
        if row.kind == "class":
            check_class(path, function, row.methods)
    except ConfigError as error:
        raise ConfigError([f"{row.flag} {problem}" for problem in error.problems]) from error
    return UserFunction(row.flag, path, function)


def _parameters(row: Hook, config: Config) -> Sequence[str]:
    if row.key == "reward.custom_rm_path" and config.reward.group_rm:
        return ("config", "samples")
    return row.parameters
