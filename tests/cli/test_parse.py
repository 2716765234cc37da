"""The grammar: words and YAML to settings, suggestions for misspelt names, all problems at once."""

from pathlib import Path

import pytest

from vime.cli.parse import Catalogue, Parsed, parse


def given(*words: str) -> Parsed:
    return parse(words, Catalogue())


def value(result: Parsed, key: str) -> object:
    assert not result.problems, result.problems
    return result.given[key].value


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["--rollout-batch-size", "8"], "vime.rollout.rollout_batch_size", 8),
        (["--rollout-batch-size=8"], "vime.rollout.rollout_batch_size", 8),
        (["--rollout_batch_size", "8"], "vime.rollout.rollout_batch_size", 8),
        (["--rollout-top-k", "-1"], "vime.rollout.rollout_top_k", -1),
        (["--eps-clip", "2e-1"], "vime.algo.eps_clip", 0.2),
        (["--colocate"], "vime.cluster.colocate", True),
        (["--colocate", "--no-colocate"], "vime.cluster.colocate", False),
        (["--save-optim"], "vime.checkpoint.no_save_optim", False),
        (["--rollout-stop", "a", "b c"], "vime.rollout.rollout_stop", ["a", "b c"]),
        (["--rollout-stop=--"], "vime.rollout.rollout_stop", ["--"]),
        (["--rollout-stop-token-ids", "[1, 2]"], "vime.rollout.rollout_stop_token_ids", [1, 2]),
        (["--apply-chat-template-kwargs", '{"a": 1}'], "vime.data.apply_chat_template_kwargs", {"a": 1}),
        (["--rm-parts", "math=1", "a.b=-.5"], "vime.reward.rm_parts", {"math": 1.0, "a.b": -0.5}),
        (["--rm-parts=math=2"], "vime.reward.rm_parts", {"math": 2.0}),
        (["--rm-parts", '{"math": 1}'], "vime.reward.rm_parts", {"math": 1.0}),
        (["--load", "none"], "vime.checkpoint.load", None),
        (["--lr", "1e-6", "--lr", "2e-6"], "megatron.lr", 2e-6),
        (["--num-experts", "8"], "megatron.num_moe_experts", 8),
        (["--norm-epsilon", "1e-6"], "megatron.layernorm_epsilon", 1e-6),
        (["--disable-bias-linear"], "megatron.add_bias_linear", False),
        (["--no-rope-fusion"], "megatron.apply_rope_fusion", False),
        (["--no-overlap-grad-reduce"], "megatron.overlap_grad_reduce", False),
        (["--recompute-activations"], "megatron.recompute_granularity", "selective"),
        (["--moe-layer-freq", "[0, 1, 1]"], "megatron.moe_layer_freq", [0, 1, 1]),
        (["--moe-router-load-balancing-type", "none"], "megatron.moe_router_load_balancing_type", "none"),
        (["--bf16"], "megatron.bf16", True),
        (["--router-policy", "round_robin"], "router.policy", "round_robin"),
        (["--router-max-concurrent-requests=7"], "router.max_concurrent_requests", 7),
    ],
)
def test_words_become_typed_values(words: list[str], key: str, expected: object) -> None:
    got = value(given(*words), key)
    assert got == expected and type(got) is type(expected)


def test_the_last_of_two_spellings_of_one_setting_wins() -> None:
    result = given("--recompute-activations", "--recompute-granularity", "full")
    assert value(result, "megatron.recompute_granularity") == "full"


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("--rollout-bach-size", "--rollout-batch-size"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--router-polcy", "--router-policy"),
        ("--num-expert", "--num-experts"),
        ("--no-colocat", "--no-colocate"),
        ("--n-sample-per-prompt", "--n-samples-per-prompt"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_nearest_name(misspelt: str, right: str) -> None:
    result = given(misspelt, "2")
    assert len(result.problems) == 1 and not result.given
    assert result.problems[0] == f"{misspelt} is not a setting; did you mean {right}?"


@pytest.mark.parametrize("prefix", ["vllm", "vlm", "vlllm", "vlmm"])
def test_a_misspelt_vllm_flag_is_refused_with_the_nearest_name(prefix: str) -> None:
    result = given(f"--{prefix}-gpu-memory-utilisation", "0.4")
    assert result.problems == [
        f"--{prefix}-gpu-memory-utilisation is not a setting; did you mean --vllm-gpu-memory-utilization?"
    ]


def test_names_are_never_abbreviated() -> None:
    result = given("--rollout-batch", "8")
    assert not result.given and "--rollout-batch is not a setting" in result.problems[0]


def test_a_name_near_nothing_points_at_the_tables() -> None:
    assert "--help-megatron" in given("--zzzz", "1").problems[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rollout-batch-size", "eight"], "--rollout-batch-size is 'eight', but needs a whole number"),
        (["--start-rollout-id", str(2**63)], f"--start-rollout-id is '{2**63}', but needs a whole number below 2**63"),
        (["--rollout-batch-size", "8.0"], "--rollout-batch-size is '8.0', but needs a whole number"),
        (["--lr", "nan"], "--lr is 'nan', but needs a finite number"),
        (["--lr", "1e999"], "--lr is '1e999', but needs a finite number"),
        (["--save", ""], "--save is empty, but needs text; leave it out if it is not wanted"),
        (
            ["--eval-prompt-data", "a", ""],
            "--eval-prompt-data is empty, but needs text; leave it out if it is not wanted",
        ),
        (["--loss-type", "x"], "--loss-type is 'x', but needs one of policy_loss, sft_loss, custom_loss"),
        (["--rollout-batch-size"], "--rollout-batch-size needs one value (a whole number), got none"),
        (["--rollout-batch-size", "1", "2"], "--rollout-batch-size needs one value (a whole number), got 2: 1 2"),
        (["--colocate", "maybe"], "--colocate takes no value, got 'maybe'; write --colocate or --no-colocate"),
        (["--rollout-stop"], "--rollout-stop needs one or more values (text)"),
        (["--apply-chat-template-kwargs", "{a}"], "--apply-chat-template-kwargs is '{a}', but needs JSON"),
        (["stray"], "'stray' stands alone: no flag before it takes it; flags begin with two dashes"),
        (["--balance-data"], "--balance-data is not here: micro-batches are always balanced over the ranks"),
        (["--use-score-centering"], "--use-score-centering is not here yet: not there"),
        (
            ["--sglang-mem-fraction-static", "0.7"],
            "--sglang-mem-fraction-static is called --vllm-gpu-memory-utilization here",
        ),
        (
            ["--sglang-log-level", "info"],
            "--sglang-log-level is not here: the engine is vLLM, whose settings begin with --vllm- (--help-vllm)",
        ),
        (["run.yaml"], "'run.yaml' stands alone: no flag before it takes it; did you mean --config run.yaml?"),
        (["--seed=1", "stray"], "'stray' stands alone: no flag before it takes it; flags begin with two dashes"),
        (["--rollout-batch-size", "none"], "--rollout-batch-size is 'none', but needs a whole number"),
        (["--router-port", "1"], "--router-port is not set here: vime picks a free port"),
        (["--layernorm-epsilon", "1"], "--layernorm-epsilon is not set here: Megatron-LM calls it --norm-epsilon"),
        (["--config"], "--config needs the path of a YAML file"),
        (["--config", "no/such.yaml"], "--config no/such.yaml cannot be read: No such file or directory"),
        (["--rm-parts"], "--rm-parts needs one or more NAME=NUMBER"),
        (["--rm-parts", "math"], "--rm-parts holds 'math', but needs NAME=NUMBER ..."),
        (["--rm-parts", "math=x"], "--rm-parts holds 'math=x', but needs NAME=NUMBER ..."),
        (["--rm-parts", "math=inf"], "--rm-parts holds 'math=inf', but needs NAME=NUMBER ..."),
        (["--rm-parts", "math=1", "math=2"], "--rm-parts names math twice; keep one"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(words: list[str], problem: str) -> None:
    assert given(*words).problems == [problem]


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--vllm-model", "--hf-checkpoint"),
        ("--vllm-tensor-parallel-size", "--rollout-num-gpus-per-engine"),
        ("--vllm-enable-sleep-mode", "it follows from --colocate and --offload-rollout"),
        ("--vllm-seed", "--rollout-seed"),
        ("--vllm-dtype", "the dtype that is trained in"),
        ("--vllm-quantization", "unquantized"),
        ("--vllm-max-model-len", "--rollout-max-context-len"),
        ("--vllm-port", "a free port"),
        ("--vllm-api-key", "vime makes a key"),
        ("--vllm-weight-transfer-config", "--update-weight-transport"),
    ],
)
def test_what_vime_owns_of_vllm_is_refused_with_what_to_use(flag: str, instead: str) -> None:
    problems = given(flag, "1").problems
    assert len(problems) == 1 and instead in problems[0]


def test_whatever_the_launchers_refuse_is_refused_here_already() -> None:
    from vime.engine.vllm.router import _OWNED
    from vime.engine.vllm.server import OWNED_ARGUMENTS

    catalogue = Catalogue()
    for owner, owned in (("vllm", OWNED_ARGUMENTS), ("router", _OWNED)):
        for name in owned:
            assert catalogue.table(owner)[f"{owner}-{name.replace('_', '-')}"].refusal


def test_vllm_values_are_typed() -> None:
    result = given(
        "--vllm-gpu-memory-utilization", "0.4", "--vllm-max-num-batched-tokens", "2k", "--vllm-enforce-eager"
    )
    assert not result.problems
    got = {key: g.value for key, g in result.given.items()}
    assert got == {"vllm.gpu_memory_utilization": 0.4, "vllm.max_num_batched_tokens": 2000, "vllm.enforce_eager": True}
    assert given("--vllm-speculative-config", '{"method": "ngram"}').given["vllm.speculative_config"].value == {
        "method": "ngram"
    }
    assert given("--no-vllm-enforce-eager").given["vllm.enforce_eager"].value is False
    assert given("--vllm-no-enforce-eager").given["vllm.enforce_eager"].value is False
    assert "is 'much', but needs a finite number" in given("--vllm-gpu-memory-utilization", "much").problems[0]


def write(tmp_path: Path, text: str, name: str = "a.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_yaml_takes_the_same_names_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "rollout-batch-size: 8\nn_samples_per_prompt: 4\nlr: 1e-6\ncolocate: true\nrollout-stop: [a, b]\n"
        "apply-chat-template-kwargs: {a: [1, 2]}\ndisable-bias-linear: true\nload: null\nrouter-policy: random\n"
        "no-overlap-grad-reduce: true\nprompt-data: a.jsonl\nprompt-data-weights: 1\n",
    )
    result = given("--config", path)
    assert not result.problems
    assert {key: g.value for key, g in result.given.items()} == {
        "vime.rollout.rollout_batch_size": 8,
        "vime.rollout.n_samples_per_prompt": 4,
        "megatron.lr": 1e-6,
        "vime.cluster.colocate": True,
        "vime.rollout.rollout_stop": ["a", "b"],
        "vime.data.apply_chat_template_kwargs": {"a": [1, 2]},
        "megatron.add_bias_linear": False,
        "vime.checkpoint.load": None,
        "router.policy": "random",
        "megatron.overlap_grad_reduce": False,
        "vime.data.prompt_data": ["a.jsonl"],
        "vime.data.prompt_data_weights": [1.0],
    }
    assert {g.origin for g in result.given.values()} == {f"--config {path}"}


def test_weights_are_a_mapping_in_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "rm_parts: {math: 1, my.module.format: 0.1}")
    assert value(given("--config", path), "vime.reward.rm_parts") == {"math": 1.0, "my.module.format": 0.1}


def test_flags_win_over_yaml_and_later_files_over_earlier(tmp_path: Path) -> None:
    one = write(tmp_path, "seed: 1\nlr: 1e-6\nrollout-batch-size: 1\n", "one.yaml")
    two = write(tmp_path, "seed: 2\nlr: 2e-6\n", "two.yaml")
    result = given("--seed", "3", "--config", one, "--config", two)
    assert not result.problems
    assert [result.given[k].value for k in ("vime.train.seed", "megatron.lr", "vime.rollout.rollout_batch_size")] == [
        3,
        2e-6,
        1,
    ]
    assert result.given["vime.train.seed"].origin == "command line"
    assert result.given["megatron.lr"].origin == f"--config {two}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rollout-bach-size: 1", ": rollout-bach-size is not a setting; did you mean --rollout-batch-size?"),
        ("rollout-batch-size: true", ": rollout-batch-size is True, but needs a whole number"),
        ("rollout-batch-size: 1.5", ": rollout-batch-size is '1.5', but needs a whole number"),
        ("rollout-batch-size: null", ": rollout-batch-size is null, but needs a whole number"),
        ("rollout-stop: {a: b}", ": rollout-stop is {'a': 'b'}, but needs a list of text"),
        ("colocate: 1", ": colocate is 1, but needs true or false"),
        ("seed: [1]", ": seed is [1], but needs a whole number"),
        ("load: 2024-01-01", ": load is 2024-01-01, which YAML reads as a date; put it in quotes"),
        ("seed: 1\nlr: 1\nseed: 2", " sets seed twice, in lines 1 and 3; keep one"),
        ("num-epoch: 1\nnum_epoch: 2", " sets num_epoch twice, in lines 1 and 2; keep one"),
        ("a: " + "[" * 5000, " is not YAML: "),
        ("- a", " must hold `name: value` lines, not a list"),
        ("a: [", " is not YAML: "),
        ("rm_parts: [math]", "needs a mapping of NAME=NUMBER"),
        ("rm_parts: {math: much}", "holds 'math=much'"),
    ],
)
def test_wrong_yaml_is_named_with_its_file(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    problems = given("--config", path).problems
    assert len(problems) == 1 and path in problems[0] and problem in problems[0]


def test_all_problems_are_collected(tmp_path: Path) -> None:
    path = write(tmp_path, "nosuchthing: 1\nseed: x\n")
    result = given("--config", path, "--lr", "x", "--rollout-bach-size", "1", "--colocate")
    assert len(result.problems) == 4
    assert list(result.given) == ["vime.cluster.colocate"]


def test_a_list_given_several_times_is_one_list() -> None:
    parsed = parse(["--rollout-stop", "a", "b", "--seed", "1", "--rollout-stop", "c", "--seed", "2"], Catalogue())
    assert not parsed.problems
    values = {key: given.value for key, given in parsed.given.items()}
    assert values == {"vime.rollout.rollout_stop": ["a", "b", "c"], "vime.train.seed": 2}
