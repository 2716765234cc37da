"""`vime plan`: a configuration's memory without devices, and its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.main import main

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"hf-checkpoint: {model.parent}\nactor-num-gpus-per-node: 8\ntensor-model-parallel-size: 2\n"
        "sequence-parallel: true\npipeline-model-parallel-size: 2\nuse-dynamic-batch-size: true\n"
        "max-tokens-per-gpu: 16384\ncolocate: true\nvllm-gpu-memory-utilization: 0.4\n"
    )
    return path


def as_json(capsys, *argv: str) -> tuple[int, dict]:
    code = main(["plan", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_a_configuration_that_fits_ends_with_0_and_one_that_does_not_with_1(capsys, recipe):
    assert main(["plan", "--config", str(recipe), "--device-memory-gib", "140"]) == 0
    out = capsys.readouterr().out
    assert "4,022,468,096 parameters, bfloat16; 8 training ranks: TP 2 x PP 2 x DP 2" in out
    assert "optimizer state" in out and "\nfits: " in out
    assert main(["plan", "--config", str(recipe), "--device-memory-gib", "24"]) == 1
    assert "does not fit: a device of pipeline rank 0 needs" in capsys.readouterr().out


def test_json_has_every_part_of_every_stage(capsys, recipe):
    code, got = as_json(capsys, "--config", str(recipe), "--device-memory-gib", "140")
    assert code == 0 and got["problems"] == [] and len(got["devices"]) == 2
    for device in got["devices"]:
        assert device["total_bytes"] == sum(device["parts_bytes"].values())
        assert device["parts_bytes"]["engine"] == round(0.4 * 140 * 2**30)
    assert got["training"]["tokens"] == 16384 and got["division"]["data"] == 2


def test_engines_that_sleep_and_a_trainer_that_leaves_are_counted_where_they_then_are(capsys, recipe):
    flags = ("--config", str(recipe), "--device-memory-gib", "140", "--rollout-max-context-len", "2048")
    _, stay = as_json(capsys, *flags)
    _, sleep = as_json(capsys, *flags, "--offload-rollout", "--no-offload-train")
    _, turns = as_json(capsys, *flags, "--offload")
    for first, second, third in zip(stay["devices"], sleep["devices"], turns["devices"], strict=True):
        assert second["parts_bytes"] == third["parts_bytes"] == {**first["parts_bytes"], "engine": 2 * 2**30}
    assert sleep["host_bytes_per_node"] == stay["host_bytes_per_node"]
    parts = [device["parts_bytes"] for device in turns["devices"]]
    away = max(part["weights"] + part["optimizer state"] for part in parts)
    assert turns["host_bytes_per_node"] == stay["host_bytes_per_node"] + 8 * away
    assert main(["plan", *flags, "--offload"]) == 0
    assert "shared with the trainer (engines sleep while the trainer works, and it leaves" in capsys.readouterr().out


def test_shared_devices_that_fit_in_no_way_say_so(capsys, recipe):
    flags = ("--no-offload-rollout", "--vllm-gpu-memory-utilization", "0.9", "--rollout-max-context-len", "2048")
    code, got = as_json(capsys, "--config", str(recipe), "--device-memory-gib", "80", *flags)
    assert code == 1 and "drop --no-offload-rollout" in got["problems"][0]


def test_offload_flags_that_contradict_each_other_are_wrong_settings_not_a_lack_of_memory(capsys, recipe):
    flags = ("--config", str(recipe), "--device-memory-gib", "140", "--offload-train", "--no-offload-rollout")
    assert main(["plan", *flags]) == 2
    assert "drop the one or the other" in capsys.readouterr().err
    assert main(["plan", "--config", str(recipe), "--no-colocate", "--offload-train"]) == 2
    assert (
        "--offload-train: without --colocate trainer and engines have devices of their own" in capsys.readouterr().err
    )


def test_flags_win_over_the_file_and_a_config_json_is_a_model(capsys, recipe, model):
    _, got = as_json(capsys, "--config", str(recipe), "--hf-checkpoint", str(model), "--no-colocate", "--bf16")
    assert got["devices"][0]["parts_bytes"]["engine"] == 0
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    _, less = as_json(capsys, "--config", str(recipe), "--no-colocate", *recompute)
    assert less["devices"][0]["moments_bytes"]["activations"] < got["devices"][0]["moments_bytes"]["activations"] / 3


def test_without_a_token_limit_the_longest_sample_counts(capsys, model):
    _, got = as_json(capsys, "--hf-checkpoint", str(model), "--rollout-max-context-len", "3000", "--micro-batch-size=2")
    assert got["training"]["tokens"] == 6000


def test_an_engine_that_has_no_room_for_a_sequence_does_not_fit(capsys, recipe):
    code, got = as_json(
        capsys, "--config", str(recipe), "--device-memory-gib", "140", "--vllm-gpu-memory-utilization", "0.08"
    )
    assert code == 1 and "an engine's share of 0.08 leaves a KV cache of" in got["problems"][0]


def test_host_memory_is_compared_where_it_is_stated(capsys, recipe):
    code, got = as_json(capsys, "--config", str(recipe), "--device-memory-gib", "140", "--host-memory-gib", "8")
    assert code == 1 and "a training node needs" in got["problems"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--hf-checkpoint is required"),
        (("--hf-checkpoint", "{model}", "--tensor-model-parallel-size", "3"), "does not divide"),
        (("--hf-checkpoint", "{model}", "--colocate"), "--device-memory-gib is required with --colocate"),
        (("--hf-checkpoint", "{model}", "--tensor-model-paralel-size", "2"), "tensor-model-parallel-size"),
        (("--hf-checkpoint", "{model}", "--fp16"), "--fp16 is True"),
        (("--device-memory-gib", "nan"), "--device-memory-gib is nan, but must be above 0"),
        (("--device-memory-gib", "inf"), "--device-memory-gib is inf, but must be above 0"),
        (("--host-memory-gib=-1",), "--host-memory-gib is -1, but must be above 0"),
        (("--nodes", "0"), "--nodes is 0, but must be from 1"),
        (("--hf-checkpoint", "{model}", "--devices-per-node", "0"), "--devices-per-node is 0, but must be from 1"),
        (("--hf-checkpoint", "{model}", "--actor-num-gpus-per-node", "0"), "--actor-num-gpus-per-node is 0"),
        (("--hf-checkpoint", "{model}", "--actor-num-nodes", "-1"), "--actor-num-nodes is -1"),
        (("--hf-checkpoint", "{model}", "--micro-batch-size", "-1"), "--micro-batch-size is -1"),
        (("--hf-checkpoint", "{model}", "--rollout-num-gpus-per-engine", "0"), "--rollout-num-gpus-per-engine is 0"),
        (("--hf-checkpoint", "{model}", "--vllm-gpu-memory-utilization", "1.5"), "must be above 0 and at most 1"),
        (("--hf-checkpoint", "{model}", "--vllm-kv-cache-memory-bytes", "-1"), "must be at least 1"),
        (("--hf-checkpoint", "x" * 5000), "cannot be looked for"),
        (("--hf-checkpoint", __file__), "is a file"),
    ],
)
def test_wrong_settings_end_with_2(capsys, model, words, message):
    assert main(["plan", *(w.format(model=model) for w in words)]) == 2
    assert message in capsys.readouterr().err


def test_an_optimizer_on_the_host_is_there_whole_unless_a_part_is_named(capsys, recipe):
    flags = ("--config", str(recipe), "--device-memory-gib", "140")
    _, device = as_json(capsys, *flags)
    _, host = as_json(capsys, *flags, "--optimizer-cpu-offload")
    _, half = as_json(capsys, *flags, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5")
    state = [x["devices"][0]["parts_bytes"]["optimizer state"] for x in (device, half, host)]
    assert state[2] == 0 and state[1] == round(state[0] / 2)
    assert host["host_bytes_per_node"] - device["host_bytes_per_node"] == pytest.approx(
        8 * state[0] * 16 / 12, rel=1e-4
    )


def test_a_dtype_that_nobody_asked_for_is_said(capsys, model):
    flags = ("--hf-checkpoint", str(model), "--actor-num-gpus-per-node", "2")
    model.write_text(json.dumps({**SHAPE, "torch_dtype": "float32"}))
    assert main(["plan", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "planned in float32, which the checkpoint is stored in; with --bf16 the run would be in bfloat16"
    )
    assert lines[2].startswith("GiB of one device") and lines[2].endswith("pipeline 0")
    for said in ("--bf16", "--no-bf16"):
        assert main(["plan", *flags, said]) == 0
        assert "planned in" not in capsys.readouterr().out
    model.write_text(json.dumps({**SHAPE, "torch_dtype": "float16"}))
    assert main(["plan", *flags]) == 2
    assert "the checkpoint's dtype is float16, which is not trained in" in capsys.readouterr().err


def test_host_memory_alone_is_compared_in_words_too(capsys, model):
    assert main(["plan", "--hf-checkpoint", str(model), "--host-memory-gib", "4"]) == 1
    assert "does not fit: a training node needs" in capsys.readouterr().out


def test_larger_groups_of_micro_batches_keep_more_activations(capsys, recipe):
    virtual = ("--config", str(recipe), "--no-colocate", "--num-virtual-stages-per-pipeline-rank", "2")
    _, pairs = as_json(capsys, *virtual)
    _, fours = as_json(capsys, *virtual, "--microbatch-group-size-per-virtual-pipeline-stage", "4")
    less, more = (got["devices"][0]["moments_bytes"]["activations"] for got in (pairs, fours))
    assert fours["division"]["group"] == 4 and 6 / 5 < more / less < 7 / 5  # stages in flight, and what works beside


def test_a_critic_on_devices_of_its_own_has_a_table_of_its_own(capsys, recipe):
    ppo = ["--config", str(recipe), "--advantage-estimator", "ppo", "--device-memory-gib", "140"]
    _, in_turn = as_json(capsys, *ppo)
    code, apart = as_json(capsys, *ppo, "--critic-num-gpus-per-node", "4", "--critic-pipeline-model-parallel-size", "1")
    assert code == 0 and "critic_devices" not in in_turn
    of_policy, of_critic = apart["devices"][0]["parts_bytes"], apart["critic_devices"]
    assert of_policy["critic and its gradients"] == 0 < in_turn["devices"][0]["parts_bytes"]["critic and its gradients"]
    assert len(of_critic) == 1 and of_critic[0]["total_bytes"] == sum(of_critic[0]["parts_bytes"].values())
    main(["plan", *ppo, "--critic-num-gpus-per-node", "4", "--device-memory-gib", "20"])
    out = capsys.readouterr().out
    assert "GiB of a critic's device" in out and "does not fit: a device of the critic's own needs" in out


def test_a_layout_that_the_critics_ranks_cannot_have_is_refused(capsys, recipe):
    flags = ["--advantage-estimator", "ppo", "--critic-num-gpus-per-node", "3", "--device-memory-gib", "140"]
    assert main(["plan", "--config", str(recipe), *flags]) == 2
    assert "the critic's 3 ranks" in capsys.readouterr().err


def test_functions_are_looked_for_where_the_command_is_given(tmp_path, recipe):
    """On a cluster every setting is checked, as train.py would."""
    (tmp_path / "own_reward.py").write_text("async def reward(config, sample):\n    return 1.0\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n')
    words = ["--devices-per-node", "8", "--device-memory-gib", "140", "--prompt-data", "data.jsonl"]
    words += ["--rollout-batch-size", "8", "--num-rollout", "1", "--input-key", "prompt"]
    words += ["--n-samples-per-prompt", "8", "--lr", "1e-6"]
    for name, code in (("own_reward.reward", 0), ("no_such_reward.reward", 2)):
        command = [Path(sys.executable).with_name("vime"), "plan", "--config", recipe, *words, "--custom-rm-path", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
    assert "importing no_such_reward failed" in done.stderr
