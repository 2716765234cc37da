"""From argv to the resolved configuration: values, origins, and every problem at once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.cli.resolve import resolve
from vime.config import Config
from vime.errors import ConfigError


def problems_of(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(argv)
    return caught.value.problems


def test_a_right_command_line_resolves(argv: list[str], checkpoint: Path) -> None:
    resolved = resolve([*argv, "--weight-decay", "0.1", "--router-policy", "round_robin"])
    assert isinstance(resolved.config, Config)
    assert resolved.config.rollout.rollout_batch_size == 4
    assert resolved.config.checkpoint.hf_checkpoint == str(checkpoint)
    assert resolved.config.megatron == {"lr": 1e-4, "weight_decay": 0.1}
    assert resolved.config.router == {"policy": "round_robin"}
    assert resolved.config.vllm == {}


def test_each_value_has_its_origin(argv: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("eps_clip: 0.3\nlr: 5e-5\nseed: 7\n")
    resolved = resolve([*argv, "--config", str(recipe), "--seed", "8"])
    origin = resolved.origin
    assert origin["rollout-batch-size"] == "command line"
    assert origin["eps-clip"] == f"--config {recipe}"
    assert origin["seed"] == "command line" and resolved.config.train.seed == 8
    assert origin["lr"] == "command line"
    assert origin["rollout-seed"] == "default"
    assert origin["rollout-max-context-len"] == origin["num-layers"] == "HF checkpoint"


def test_values_that_follow_from_others_are_filled_in(argv: list[str]) -> None:
    config = resolve([*argv, "--eps-clip", "0.3"]).config
    assert config.train.global_batch_size == 8
    assert config.algo.eps_clip_high == 0.3
    assert config.rollout.rollout_max_context_len == 512
    assert config.rollout.over_sampling_batch_size is None, "else each replaced group would start a whole batch"
    assert config.sync.update_weight_transport == "auto", "decided when the nodes are known"
    assert config.eval.eval_temperature == 1.0
    assert config.cluster.rollout_num_gpus == 1


def test_a_model_flag_that_agrees_with_the_checkpoint_is_fine(argv: list[str]) -> None:
    model = ["--num-layers", "4", "--swiglu", "--rotary-base", "1000000", "--norm-epsilon", "1e-6", "--qk-layernorm"]
    model += ["--untie-embeddings-and-output-weights", "--disable-bias-linear", "--vocab-size", "100"]
    model += ["--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"]
    megatron = resolve([*argv, *model]).config.megatron
    assert megatron["num_layers"] == 4 and megatron["add_bias_linear"] is False
    assert "rotary_base" not in megatron, "no field of megatron-core's TransformerConfig"


@pytest.mark.parametrize(
    ("words", "said", "real"),
    [
        (["--num-layers", "6"], "6", "4"),
        (["--no-swiglu"], "False", "True"),
        (["--rotary-base", "10000"], "10000", "1000000"),
        (["--num-experts", "8"], "8", "None"),
        (["--normalization", "LayerNorm"], "LayerNorm", "RMSNorm"),
    ],
)
def test_a_model_flag_that_contradicts_the_checkpoint_is_a_problem(
    argv: list[str], words: list[str], said: str, real: str
) -> None:
    problems = problems_of([*argv, *words])
    assert len(problems) == 1 and words[0].replace("--no-", "--") in problems[0]
    assert said in problems[0] and real in problems[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--expert-model-parallel-size", "2"],
        ["--cp-comm-type", "p2p"],
        ["--overlap-p2p-communication-warmup-flush"],
        ["--fp16"],
        ["--hidden-dropout", "0.1"],
    ],
)
def test_what_the_trainer_cannot_do_is_refused_before_it_starts(argv: list[str], words: list[str]) -> None:
    problems = problems_of([*argv, *words])
    assert len(problems) == 1 and problems[0].startswith(words[0].replace("communication", "comm") + " is ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-virtual-stages-per-pipeline-rank", "2"], "give --pipeline-model-parallel-size, too"),
        (["--num-layers-per-virtual-pipeline-stage", "1"], "give --pipeline-model-parallel-size, too"),
        (["--decoder-first-pipeline-num-layers", "1"], "give --pipeline-model-parallel-size, too"),
        (["--pipeline-model-parallel-layout", "EttL"], "give --pipeline-model-parallel-size, too"),
        (["--overlap-p2p-communication"], "only virtual stages can overlap"),
    ],
)
def test_stages_that_are_not_possible_are_refused_before_it_starts(
    argv: list[str], words: list[str], sentence: str
) -> None:
    [problem] = problems_of([*argv, *words])
    assert sentence in problem


def test_ranks_that_a_layout_needs_are_asked_for_before_it_starts(argv: list[str]) -> None:
    [problem] = problems_of([*argv, "--tensor-model-parallel-size", "2"])
    assert problem.startswith("--tensor-model-parallel-size 2 makes 2 ranks that work together")


def test_the_values_that_the_trainer_can_do_pass(argv: list[str]) -> None:
    words = ["--tensor-model-parallel-size", "1", "--hidden-dropout", "0.0", "--no-rope-fusion", "--bf16"]
    words += ["--expert-tensor-parallel-size", "1", "--make-vocab-size-divisible-by", "128"]
    megatron = resolve([*argv, *words]).config.megatron
    assert megatron["make_vocab_size_divisible_by"] == 128 and megatron["apply_rope_fusion"] is False


def test_heads_that_engines_cannot_take_are_a_problem_of_runs_that_start_engines(
    argv: list[str], checkpoint: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    with pytest.raises(ConfigError, match=r"attention heads of 16 numbers \(head_dim\), but engines on this platform"):
        resolve(argv, fetch=False)
    sft = [*argv, "--loss-type", "sft_loss", "--disable-compute-advantages-and-returns"]
    with pytest.raises(ConfigError) as caught:
        resolve([*sft, "--debug-train-only"], fetch=False)
    assert not any("attention heads" in problem for problem in caught.value.problems)


def test_all_problems_come_at_once(argv: list[str]) -> None:
    wrong = [
        "--rollout-bach-size",
        "4",
        "--lr",
        "x",
        "--eps-clip",
        "2",
        "--global-batch-size",
        "3",
        "--rollout-top-p=.9",
    ]
    problems = problems_of(
        [*argv, *wrong, "--rollout-top-p=.9", "--kl-loss-type", "k2", "--tensor-model-parallel-size", "2"]
    )
    for flag in ("rollout-bach-size", "lr", "eps-clip", "global-batch-size", "rollout-top-p", "kl-loss-type"):
        assert sum(p.startswith(f"--{flag} ") for p in problems) == 1, (flag, problems)
    assert "--tensor-model-parallel-size 2 makes 2 ranks" in " ".join(problems)
    assert len(problems) == 7


def test_a_refused_value_is_not_also_called_missing(argv: list[str]) -> None:
    assert len(problems_of([*argv, "--rollout-batch-size", "many"])) == 1


@pytest.mark.parametrize("words", [["--config", "no/such.yaml"], ["such.yaml"]])
def test_what_a_file_that_was_not_read_would_set_is_not_called_missing(words: list[str]) -> None:
    assert len(problems_of(words)) == 1


def test_no_learning_rate_is_found_before_the_start(argv: list[str]) -> None:
    assert problems_of([*argv, "--lr", "none"]) == ["--lr is required: the learning rate, such as 1e-6"]


def test_nothing_given_names_everything_required() -> None:
    text = " ".join(problems_of(["--platform", "cpu"]))
    for flag in ("--hf-checkpoint", "--prompt-data", "--rollout-batch-size", "--num-rollout", "--lr", "--rm-type"):
        assert flag in text


def test_an_unsupported_architecture_is_a_problem(argv: list[str], checkpoint: Path) -> None:
    text = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(
        text.replace("Qwen3ForCausalLM", "GPT2LMHeadModel").replace("qwen3", "gpt2")
    )
    assert any("gpt2" in p and "qwen3" in p for p in problems_of(argv))


def test_a_checkpoint_that_is_not_there_is_a_problem(argv: list[str], tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert problems_of([*argv, "--hf-checkpoint", nowhere]) == [
        f"--hf-checkpoint {nowhere}: there is no such folder, and it is no hub name (owner/name)"
    ]


def edit(folder: Path, value: object, key: str) -> None:
    """Change one key of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer (tokenizer.json, tokenizer.model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"123"), "it has 3 bytes"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "holds no b.safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}"),
            "lacks 47 tensors, among them lm_head.weight",
        ),
        (lambda folder: edit(folder, "bfloat16", "dtype"), "config.json says bfloat16, but its tensors"),
        (lambda folder: edit(folder, 192, "intermediate_size"), "has 12 tensors of other shapes"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_a_problem_for_a_run_and_not_for_printing(
    argv: list[str], checkpoint: Path, change: Callable[[Path], object], words: str
) -> None:
    change(checkpoint)
    (problem,) = problems_of(argv)
    assert words in problem and str(checkpoint) in problem
    resolve(argv, fetch=False)


def test_rewards_of_several_numbers_choose_their_keys(argv: list[str]) -> None:
    at = argv.index("--rm-type")
    rest = argv[:at] + argv[at + 2 :]
    for words, keys in (
        (["--rm-type", "dapo"], ("score", "acc")),
        (["--rm-type", "dapo", "--reward-key", "acc"], ("acc", "acc")),
        (["--rm-parts", "math=1", "f1=0.5"], ("total", "total")),
        (["--rm-type", "math"], (None, None)),
    ):
        config = resolve([*rest, *words]).config
        assert (config.reward.reward_key, config.eval.eval_reward_key) == keys


def test_the_checkpoint_of_a_critic_is_looked_at_before_it_starts(
    argv: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    ppo = [*argv, "--advantage-estimator", "ppo", "--critic-load"]
    critic = tmp_path / "critic"
    shutil.copytree(checkpoint, critic)
    edit(critic, ["Qwen3ForTokenClassification"], "architectures")
    assert resolve([*ppo, str(critic)]).config.critic.critic_load == str(critic)
    (critic / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (problem,) = problems_of([*ppo, str(critic)])
    assert problem.startswith(f"--critic-load: {critic} lacks 46 tensors"), "all but the head"
    assert problems_of([*argv, "--critic-load", str(critic)]) == [
        f"--critic-load is {str(critic)!r}, but nothing reads it: add --advantage-estimator ppo, which has a critic"
    ]
