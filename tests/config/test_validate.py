"""Every cross-check: a right configuration passes, and one wrong setting gives the one sentence that names it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.config import (
    AlgoConfig,
    ClusterConfig,
    Config,
    EvalConfig,
    RewardConfig,
    TrainConfig,
)
from vime.config.validate import Facts, validate
from vime.observability.metrics import name_problem
from vime.protocols import DataSource
from vime.types import Group

SFT = "vime.rollout.sft_rollout.generate_rollout"
SHAPE = {"num_layers": 4, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 100}


async def reward(config: object, sample: object) -> float:
    return 1.0


def problems(config: Config, **facts: Any) -> list[str]:
    base: dict[str, Any] = {
        "platform": "cpu",
        "transports": ("shm", "disk"),
        "reward_names": ("exact_match", "math"),
        "shape": SHAPE,
        "megatron_limits": {
            "tp_comm_overlap": (False, "why"),
        },
        "max_position_embeddings": 64,
        "metric_problem": name_problem,
    }
    return validate(config, Facts(**{**base, **facts}))


def changed(config: Config, **changes: Any) -> Config:
    """`config` with settings changed, by "section__name"."""
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        else:
            config = replace(config, **{section: value})
    return config


def test_a_right_configuration_has_no_problem(right: Config) -> None:
    assert problems(right) == []


def test_names_of_parts_must_differ(right: Config) -> None:
    here = "tests.config.test_validate"
    twice = changed(right, reward=RewardConfig(rm_parts={f"{here}.reward": 1.0, f"{here}s.reward": 1.0}))
    assert any("two parts are called 'reward'" in problem for problem in problems(twice))
    total = changed(right, reward=RewardConfig(rm_parts={f"{here}.total": 1.0}))
    assert any("a part is called 'total'" in problem for problem in problems(total))


def test_one_kind_of_reward_at_a_time(right: Config) -> None:
    both = changed(right, reward__rm_parts={"math": 1.0})
    assert problems(both) == [
        "--rm-type exact_match and --rm-parts {'math': 1.0} are both given; keep one, or give all of them as parts "
        "(--rm-parts)"
    ]
    names = ("exact_match", "math", "remote_rm", "random")
    remote = changed(right, reward=RewardConfig(rm_type="remote_rm"), data__label_key=None)
    (problem,) = problems(remote, reward_names=names, rewards_without_label=("remote_rm", "random"))
    assert problem == "remote_rm asks a server for rewards; give its address by --rm-url"
    random = changed(right, reward=RewardConfig(rm_type="random"), data__label_key=None)
    assert problems(random, reward_names=names, rewards_without_label=("remote_rm", "random")) == []


def test_supervised_data_have_one_answer_to_a_prompt(right: Config) -> None:
    sft = {"algo__loss_type": "sft_loss", "rollout__rollout_function_path": SFT, "data__label_key": None}
    found = problems(changed(right, **sft, rollout__n_samples_per_prompt=2))
    assert found == [
        "--n-samples-per-prompt is 2, but supervised data has one answer to a prompt; use 1",
        "--label-key is required with supervised data: the key of the answer; or --apply-chat-template, if --input-key "
        "input holds whole conversations",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"checkpoint__hf_checkpoint": ""}, "--hf-checkpoint is required"),
        ({"data__prompt_data": []}, "--prompt-data is required"),
        ({"rollout__rollout_batch_size": 0}, "--rollout-batch-size is required"),
        ({"rollout__num_rollout": None}, "--num-rollout is required"),
        ({"megatron": {}}, "--lr is required"),
        ({"reward__rm_type": None}, "a reward is required"),
        ({"reward__rm_type": "maths"}, "--rm-type is 'maths', but the built-in rewards are exact_match, math"),
        ({"reward": RewardConfig(rm_parts={"maths": 1.0})}, "--rm-parts: 'maths' is neither a dotted path nor"),
        ({"reward": RewardConfig(rm_parts={"math": 0.0})}, "--rm-parts: all weights are 0"),
        ({"reward": RewardConfig(rm_parts={"math": 1.0}), "data__label_key": None}, "--rm-parts: math compares with"),
        ({"reward__rm_url": "localhost:80"}, "--rm-url is 'localhost:80', but must be an address such as http://"),
        ({"reward__rm_url": "http://[::1"}, "--rm-url is 'http://[::1', but must be an address"),
        ({"reward__rm_url": "http://h:99999/"}, "--rm-url is 'http://h:99999/', but must be an address"),
        ({"reward__rm_url": "http://me:secret@h/"}, "--rm-url holds a user name or password, which the run's folder"),
        ({"reward__rm_memory_limit_bytes": 1}, "--rm-memory-limit-bytes is 1, but must be at least"),
        ({"rollout__rollout_batch_size": -1}, "--rollout-batch-size is -1, but must be at least 0"),
        ({"rollout__rollout_temperature": 0.0}, "--rollout-temperature is 0.0, but must be above 0"),
        ({"rollout__rollout_temperature": 0.005}, "--rollout-temperature is 0.005, but vLLM samples at 0.01 at least"),
        ({"reward__rm_failure_reward": -1e39}, "--rm-failure-reward is -1e+39, but may be at most 1e+38 in size"),
        (
            {"rollout__rollout_top_p": 0.9},
            "--rollout-top-p is 0.9: the trainer computes over the tokens that it leaves",
        ),
        ({"rollout__rollout_min_p": 0.1}, "--rollout-min-p is 0.1: the trainer computes over"),
        ({"rollout__rollout_top_p": 0.0, "rollout__rollout_top_k": 9}, "--rollout-top-p is 0.0, but must be above 0"),
        ({"rollout__rollout_top_p": 0.0}, "--rollout-top-p is 0.0, but must be above 0"),
        ({"rollout__rollout_min_p": 2.0}, "--rollout-min-p is 2.0, but must be from 0"),
        ({"rollout__rollout_top_k": 1}, "--rollout-top-k is 1: each token is the only one that could be sampled"),
        ({"rollout__rollout_top_k": 0}, "--rollout-top-k is 0, but must be -1 (off) or at least 1"),
        ({"rollout__rollout_min_p": 1.0, "rollout__rollout_top_k": 9}, "--rollout-min-p is 1.0, but must be from 0"),
        ({"train__aligned": True, "vllm": {"compilation_config": {}}}, "--vllm-compilation-config is what --aligned"),
        ({"eval__eval_top_p": 0.0}, "--eval-top-p is 0.0"),
        ({"eval__eval_top_k": 0}, "--eval-top-k is 0"),
        ({"rollout__over_sampling_batch_size": 4}, "--over-sampling-batch-size is 4, less than"),
        ({"train__global_batch_size": 12}, "--global-batch-size is 12, which does not divide 8 prompts x 4"),
        ({"train__num_steps_per_rollout": 3}, "--num-steps-per-rollout is 3, which does not divide"),
        ({"train__global_batch_size": 8, "train__num_steps_per_rollout": 2}, "--global-batch-size 8 x"),
        ({"train__micro_batch_size": 5}, "an optimizer step has 32 samples, but 1 data-parallel ranks x"),
        (
            {"megatron": {"lr": 1e-6, "context_parallel_size": 2}},
            "--context-parallel-size 2 makes 2 ranks that work together, which does not divide the 1 training ranks",
        ),
        ({"cluster__actor_num_gpus_per_node": 3}, "an optimizer step has 32 samples, but 3 data-parallel ranks x"),
        ({"algo__eps_clip": 1.5}, "--eps-clip is 1.5"),
        ({"algo__eps_clip_c": 1.0}, "--eps-clip-c is 1.0"),
        ({"algo__use_kl_loss": True}, "--use-kl-loss with --kl-loss-coef 0"),
        ({"algo__kl_loss_coef": 0.1}, "--kl-loss-coef is 0.1, but the KL is not in the loss"),
        ({"rollout__n_samples_per_prompt": 1}, "--n-samples-per-prompt is 1, and a group of one"),
        ({"train__use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        (
            {"train__use_dynamic_batch_size": True, "train__max_tokens_per_gpu": 8},
            "--max-tokens-per-gpu is 8, but a sample may have 9 tokens",
        ),
        (
            {
                "train__use_dynamic_batch_size": True,
                "train__max_tokens_per_gpu": 20,
                "data__rollout_max_prompt_len": 16,
            },
            "--max-tokens-per-gpu is 20, but a sample may have 24 tokens",
        ),
        ({"rollout__rollout_max_context_len": 128}, "--rollout-max-context-len is 128, but the model has 64"),
        ({"rollout__rollout_max_response_len": 64}, "--rollout-max-response-len is 64, which leaves no room"),
        ({"data__rollout_max_prompt_len": 60}, "--rollout-max-prompt-len 60 + --rollout-max-response-len 8 = 68"),
        ({"sync__update_weight_transport": "nccl"}, "--update-weight-transport is nccl, which the cpu platform"),
        (
            {"cluster__rollout_num_gpus": 3, "cluster__rollout_num_gpus_per_engine": 2},
            "--rollout-num-gpus is 3, which 2 devices per engine",
        ),
        ({"cluster__actor_num_nodes": 2}, "--actor-num-nodes is 2, but the Ray that is started here has one node"),
        ({"train__stop_metric": "eval/heldout"}, "--stop-metric is eval/heldout, which is not known"),
        (
            {"megatron": {"lr": 1e-6, "min_lr": 1e-5}, "train__lr_decay_style": "cosine"},
            "--min-lr is 1e-05, above --lr",
        ),
        ({"megatron": {"lr": 1e-6, "bf16": True, "fp16": True}}, "--bf16 and --fp16"),
        ({"megatron": {"lr": 1e-6, "overlap_param_gather": True}}, "which --overlap-grad-reduce makes"),
        (
            {"megatron": {"lr": 1e-6, "overlap_param_gather": True, "use_distributed_optimizer": False}},
            "no weights are gathered",
        ),
        ({"megatron": {"lr": 1e-6, "distribute_saved_activations": True}}, "what --recompute-granularity full keeps"),
        (
            {"megatron": {"lr": 1e-6, "tp_comm_overlap": True}},
            "--tp-comm-overlap is True, but this version can only do False: why",
        ),
        (
            {"megatron": {"lr": 1e-6, "expert_model_parallel_size": 2}},
            "--expert-model-parallel-size is 2, but the model",
        ),
        (
            {"train__stop_metric": "train/los"},
            "--stop-metric is train/los, which is no metric; did you mean train/loss?",
        ),
        ({"train__stop_metric": "train/loss", "train__stop_window": 0}, "--stop-window is 0, but must be at least 1"),
        ({"train__seed": 2**32}, "--seed is 4294967296, but may be at most 4294967295"),
        ({"train__distributed_timeout_minutes": 10**9}, "--distributed-timeout-minutes is 1000000000, but may be"),
        ({"rollout__rollout_stop_token_ids": [1, 100]}, "--rollout-stop-token-ids 100 is no token"),
        ({"rollout__rollout_stop_token_ids": [-1]}, "--rollout-stop-token-ids -1 is no token"),
        ({"rollout__rollout_function_path": SFT}, "takes answers from the data and samples nothing"),
        ({"data__label_key": None}, "--rm-type exact_match compares with a label; name its key"),
        ({"data__apply_chat_template_kwargs": [1]}, "--apply-chat-template-kwargs is [1], but needs a JSON object"),
        ({"megatron": {"lr": 1e-6, "adam_beta1": 1.0}}, "--adam-beta1 is 1.0, but must be at least 0 and below 1"),
        ({"megatron": {"lr": 1e-6, "min_lr": 1e-7}}, "--min-lr is 1e-07, but nothing reads it: --lr-decay-style"),
        ({"megatron": {"lr": 1e-6, "bucket_size": 9}}, "--bucket-size is 9, but nothing reads it: gradients are in"),
        ({"megatron": {"lr": 1e-6, "deallocate_pipeline_outputs": True}}, "a single stage hands nothing on"),
        (
            {"megatron": {"lr": 1e-6, "pad_buckets_for_high_nccl_busbw": True, "use_distributed_optimizer": False}},
            "--pad-buckets-for-high-nccl-busbw is True, but nothing reads it: it is for the distributed optimizer",
        ),
        (
            {"megatron": {"lr": 1e-6, "apply_wd_to_qk_layernorm": True}},
            "--apply-wd-to-qk-layernorm is True, but nothing reads it: the model has no norms of",
        ),
        ({"rollout__start_rollout_id": 1}, "--start-rollout-id is 1, but the run ends before rollout 1"),
        ({"megatron": {"lr": 1e-6, "weight_decay": -0.1}}, "--weight-decay is -0.1, but must be at least 0"),
        ({"log__run_dir": "/dev/null/run"}, "--run-dir /dev/null/run cannot be made: /dev/null is a file"),
        ({"checkpoint__load": "/no/such"}, "--load /no/such: there is no such folder"),
        ({"checkpoint__save_hf": "a/{step}"}, "--save-hf a/{step}: only {rollout_id} is replaced"),
        ({"data__input_key": "question"}, "has no key 'question', only 'input', 'label'"),
        ({"data__label_key": "answer"}, "has no key 'answer'"),
        ({"data__prompt_data": ["/no/such.jsonl"]}, "--prompt-data /no/such.jsonl cannot be read: No such file"),
        ({"data__input_key": "label"}, "--input-key and --label-key are both 'label'"),
        (
            {"data__prompt_data_weights": [0.5, 0.5]},
            "--prompt-data-weights gives 2 weights for 1 words of --prompt-data",
        ),
        ({"data__prompt_data_weights": [0.0]}, "--prompt-data-weights holds 0.0, but must be above 0"),
        (
            {"data__disable_rollout_global_dataset": True},
            "--disable-rollout-global-dataset leaves nobody to make prompts; give --rollout-function-path",
        ),
        ({"data__data_source_path": "no_such_module.f"}, "--data-source-path 'no_such_module.f': importing"),
        ({"data__buffer_filter_path": "no_such_module.f"}, "--buffer-filter-path 'no_such_module.f': importing"),
        ({"eval__eval_prompt_data": ["a"]}, "--eval-prompt-data takes pairs of NAME PATH, but got 1 words: a"),
        ({"eval__eval_prompt_data": ["a", "/x"]}, "held-out set a: /x cannot be read"),
        (
            {"rollout__rollout_batch_size": 10**12, "train__global_batch_size": 7},
            "not divide 1000000000000 prompts",
        ),
        ({"rollout__rollout_function_path": "no.such"}, "--rollout-function-path 'no.such': importing no failed"),
        ({"reward__rm_type": None, "reward__custom_rm_path": "builtins.len"}, "--custom-rm-path 'builtins.len' has"),
        ({"rollout__custom_generate_function_path": "json.dumps"}, "--custom-generate-function-path 'json.dumps'"),
        ({"algo__loss_type": "sft_loss"}, "--loss-type sft_loss takes answers from the data"),
    ],
)
def test_one_wrong_setting_gives_one_sentence(right: Config, change: dict[str, Any], sentence: str) -> None:
    found = problems(changed(right, **change))
    assert len([p for p in found if sentence in p]) == 1, found
    assert len(found) == 1 or "rollout_batch_size" in str(change) or "loss_type" in str(change), found


@pytest.mark.parametrize(
    "change",
    [
        {"rollout__num_rollout": None, "rollout__num_epoch": 1},
        {"train__global_batch_size": 16},
        {"train__num_steps_per_rollout": 4},
        {"train__use_dynamic_batch_size": True, "train__max_tokens_per_gpu": 64},
        {"cluster__actor_num_gpus_per_node": 2},
        {"eval__eval_top_p": 0.9, "eval__eval_top_k": 20, "eval__eval_temperature": 0.0},
        {"rollout__rollout_top_p": 0.9, "rollout__rollout_top_k": 20, "rollout__rollout_min_p": 0.01},
        {"train__aligned": True},
        {"algo__use_kl_loss": True, "algo__kl_loss_coef": 0.1},
        {"rollout__n_samples_per_prompt": 1, "algo__disable_rewards_normalization": True},
        {"algo__loss_type": "sft_loss", "rollout__rollout_function_path": SFT, "rollout__n_samples_per_prompt": 1},
        {"megatron": {"lr": 0.0}},
        {"megatron": {"lr": 1e-6, "tensor_model_parallel_size": 1}},
    ],
)
def test_what_is_allowed_passes(right: Config, change: dict[str, Any]) -> None:
    assert problems(changed(right, **change)) == []


@pytest.mark.parametrize("cut", [{"rollout__rollout_top_p": 0.9}, {"rollout__rollout_min_p": 0.1}])
def test_a_served_teacher_is_the_one_reason_against_a_cut_of_the_vocabulary(right: Config, cut: dict[str, Any]) -> None:
    taught = {"algo__use_opd": True, "algo__opd_kl_coef": 1.0, "teacher__opd_teacher_url": "http://127.0.0.1:1"}
    (problem,) = problems(changed(right, **taught, **cut))
    assert "a vLLM server gives log-probs over the whole vocabulary" in problem


def test_a_prompt_file_with_a_bad_line_names_the_line(right: Config, tmp_path: Path) -> None:
    for content, words in (
        ('{"input": "a", "label": "b"}\n{oops\n', "line 2: not JSON"),
        ('{"input": "a", "label": "b"}\n[1]\n', "line 2: holds a list, not an object"),
        ("[1]\n", "begins with a JSON array, but one object a line"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 1: not JSON (maximum recursion depth"),
        ("\n\n", "is empty"),
    ):
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        found = problems(changed(right, data__prompt_data=[str(path)]))
        assert len(found) == 1 and words in found[0] and str(path) in found[0]


def test_a_byte_order_mark_before_the_prompts_is_fine(right: Config, tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_text('{"input": "a", "label": "b"}\n', encoding="utf-8-sig")
    assert problems(changed(right, data__prompt_data=[str(path)])) == []


def test_the_model_that_training_starts_from_is_not_overwritten(right: Config, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(model)
    config = changed(right, checkpoint__hf_checkpoint=model)
    for same in (model, model + "/", str(tmp_path / "link")):
        (found,) = problems(changed(config, checkpoint__save_hf=same))
        assert found.startswith(f"--save-hf {same} is the folder of --hf-checkpoint, which it would overwrite")
    assert problems(changed(config, checkpoint__save_hf=model + "-{rollout_id}")) == []


def test_names_of_held_out_sets_become_names_of_metrics(right: Config) -> None:
    (found,) = problems(changed(right, eval__eval_prompt_data=["a/b", *right.data.prompt_data]))
    assert "the name 'a/b' of a held-out set is empty or holds a slash" in found


def test_a_folder_that_cannot_be_written_is_a_problem(
    right: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    (found,) = problems(changed(right, checkpoint__save=str(tmp_path / "a" / "b")))
    assert found == f"--save {tmp_path / 'a' / 'b'} cannot be made: {tmp_path} is not writable"


def test_more_devices_than_the_node_has_is_a_problem(right: Config) -> None:
    assert problems(right, devices=2) == []
    assert "needs 2 devices (1 to train, 1 for engines), but this node has 1" in problems(right, devices=1)[0]
    assert problems(changed(right, cluster__colocate=True), devices=1) == []


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        ({"algo__kl_loss_type": "k2"}, "algo.kl_loss_type", "add --use-kl-loss"),
        ({"train__lr_warmup_init": 0.0}, "train.lr_warmup_init", "add --lr-warmup-iters"),
        ({"train__max_tokens_per_gpu": 64}, "train.max_tokens_per_gpu", "add --use-dynamic-batch-size"),
        ({"eval__eval_interval": 1}, "eval.eval_interval", "add --eval-prompt-data"),
        ({"eval__n_samples_per_eval_prompt": 1}, "eval.n_samples_per_eval_prompt", "add --eval-prompt-data"),
        ({"checkpoint__save_interval": 1}, "checkpoint.save_interval", "add --save"),
        ({"checkpoint__no_load_optim": True}, "checkpoint.no_load_optim", "add --load"),
        ({"rollout__num_epoch": 1}, "rollout.num_epoch", "--num-rollout counts"),
        ({"reward__group_rm": True}, "reward.group_rm", "add --custom-rm-path"),
        ({"sync__update_weight_disk_dir": "/tmp/w"}, "sync.update_weight_disk_dir", "--update-weight-transport disk"),
        ({"train__lr_decay_iters": 5}, "train.lr_decay_iters", "choose another style"),
        ({"data__tool_key": "tools"}, "data.tool_key", "add --apply-chat-template"),
        ({"critic__critic_lr": 1e-5}, "critic.critic_lr", "add --advantage-estimator ppo"),
        ({"critic__lambd": 0.9}, "critic.lambd", "add --advantage-estimator ppo"),
    ],
)
def test_a_value_that_nobody_reads_is_a_problem(right: Config, change: dict[str, Any], key: str, remedy: str) -> None:
    config = changed(right, **change)
    assert problems(config) == [], "only what the user gave counts"
    found = problems(config, explicit=frozenset({key}))
    assert len(found) == 1 and "nothing reads it" in found[0] and remedy in found[0]
    assert found[0].startswith(f"--{key.split('.')[1].replace('_', '-')} is ")


def test_every_key_of_the_tables_is_a_setting() -> None:
    from vime.config.ranges import ABOVE_ZERO, MAXIMA, MINIMA, value_of
    from vime.config.unread import _RULES

    for key in [*MINIMA, *MAXIMA, *ABOVE_ZERO, *(k for keys, _, _ in _RULES for k in keys)]:
        value_of(Config(), key)


def test_sections_are_independent_of_each_other() -> None:
    assert ClusterConfig().actor_num_nodes == 1 and AlgoConfig().eps_clip == 0.2
    assert EvalConfig().eval_prompt_data is not EvalConfig().eval_prompt_data, "lists are copied"
    assert TrainConfig().micro_batch_size == 1


def test_a_run_without_prompt_files_needs_its_own_prompts_and_an_end(right: Config) -> None:
    source = f"{__name__}.Source"
    bare = changed(right, data__prompt_data=[], data__label_key=None)
    assert problems(changed(bare, data__data_source_path=source)) == []
    assert problems(changed(bare, data__data_source_path=source, data__prompt_data=["what it likes"])) == []
    generates = changed(
        bare,
        data__disable_rollout_global_dataset=True,
        rollout__rollout_function_path="tests.rollout.hooks.rollout_of_one",
    )
    assert problems(generates) == []
    (found,) = problems(changed(generates, data__data_source_path=source))
    assert "are both given; keep one" in found
    (found,) = problems(changed(generates, rollout__num_rollout=None, rollout__num_epoch=1))
    assert found.startswith("--num-epoch counts prompts, and --disable-rollout-global-dataset has none")
    (found,) = problems(changed(generates, data__rollout_shuffle=True), explicit=frozenset({"data.rollout_shuffle"}))
    assert "--rollout-shuffle is True, but nothing reads it: --disable-rollout-global-dataset" in found


class Source(DataSource):
    def __init__(self, config: object, tokenizer: object) -> None: ...

    def get_groups(self, n: int) -> list[Group]:
        return []

    def put_back(self, groups: object) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: object) -> None: ...

    def epoch_size(self) -> int | None:
        return None
