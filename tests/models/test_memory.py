"""The estimate of a device's memory: closed forms, what each setting changes, and two measured steps."""

import dataclasses

import pytest

from tests.models.shapes import GLM_45_AIR, QWEN3_06B, QWEN3_4B, QWEN3_8B, QWEN3_30B, QWEN3_30B_6_LAYERS
from vime.models.activations import Recompute, layer_numbers, stage_numbers, stages_in_flight
from vime.models.division import Division
from vime.models.memory import (
    GIB,
    MIB,
    Engine,
    Training,
    engine_cache_tokens,
    estimate,
    estimate_critic,
    head_bytes,
)
from vime.models.parameters import parameters

FULL = Recompute(granularity="full", method="uniform")


def parts(model, division=None, engine=None, **training):
    return estimate(model, division or Division(), Training(**training), engine)[0].parts


@pytest.mark.parametrize(("dtype", "bytes_a_parameter"), [("bfloat16", (2, 4, 12)), ("float32", (4, 4, 8))])
def test_weights_gradients_and_state_of_one_rank(dtype, bytes_a_parameter):
    got = parts(QWEN3_06B, dtype=dtype)
    n = parameters(QWEN3_06B).total
    assert (got["weights"], got["gradients"], got["optimizer state"]) == tuple(n * b for b in bytes_a_parameter)


def test_a_reference_takes_host_memory_and_nothing_of_the_device():
    n = parameters(QWEN3_06B).total
    without, with_one = (estimate(QWEN3_06B, Division(), Training(num_host_weights=k))[0] for k in (0, 1))
    assert with_one.parts == without.parts
    assert with_one.host_bytes - without.host_bytes == 2 * n


def test_a_teacher_of_another_size_is_on_the_host_and_comes_to_the_device_for_its_forward_pass():
    n = parameters(QWEN3_8B).total
    (without,), (taught,) = (estimate(QWEN3_06B, Division(), Training(teacher=t)) for t in (None, QWEN3_8B))
    assert taught.host_bytes - without.host_bytes == 2 * n
    (alone,) = estimate(QWEN3_8B, Division(), Training())
    assert taught.moments["teacher's forward"] == 2 * n + alone.moments["forward alone"]
    assert taught.parts["working memory"] == taught.moments["teacher's forward"]


def test_a_critic_is_a_second_model_without_the_rows_of_a_vocabulary_head():
    hidden = QWEN3_8B.transformer["hidden_size"]
    n = parameters(QWEN3_8B).total - QWEN3_8B.vocab_size * hidden + hidden + 1
    model, state = "critic and its gradients", "critic's optimizer state"
    assert parts(QWEN3_8B)[model] == parts(QWEN3_8B)[state] == 0
    got = parts(QWEN3_8B, has_critic=True)
    assert (got[model], got[state]) == ((2 + 4) * n, 12 * n)
    assert parts(QWEN3_8B, has_critic=True, optimizer_offload_fraction=1.0)[state] == 0
    tied = parameters(QWEN3_06B).total + QWEN3_06B.transformer["hidden_size"] + 1
    assert parts(QWEN3_06B, has_critic=True)[model] == 6 * tied
    stages = estimate(QWEN3_06B, Division(pipeline=2), Training(has_critic=True))
    assert sum(stage.parts[state] for stage in stages) == 12 * tied


def test_a_critic_alone_on_its_devices_has_neither_policy_nor_logits_nor_weights_to_send():
    together = parts(QWEN3_8B, has_critic=True)
    (alone,) = estimate_critic(QWEN3_8B, Division(), Training())
    for name in ("critic and its gradients", "critic's optimizer state"):
        assert alone.parts[name] == together[name]
    assert set(alone.parts) == {
        "critic and its gradients",
        "critic's optimizer state",
        "working memory",
        "driver, NCCL, allocator",
    }
    assert "weight sync" not in alone.moments
    (policy,) = estimate(QWEN3_8B, Division(), Training())
    assert alone.moments["forward alone"] == policy.moments["forward alone"] - head_bytes(
        QWEN3_8B, Division(), Training()
    )
    halves = estimate_critic(QWEN3_8B, Division(data=2), Training())
    assert halves[0].parts["critic's optimizer state"] == pytest.approx(together["critic's optimizer state"] / 2, abs=1)


def test_optimizer_state_is_shared_by_the_ranks_with_the_same_parameters():
    n = parameters(QWEN3_8B).total
    assert parts(QWEN3_8B, Division(data=4, context=2))["optimizer state"] == round(12 * n / 8)
    assert parts(QWEN3_8B, Division(data=8), use_distributed_optimizer=False)["optimizer state"] == 12 * n


def test_a_107b_model_on_eight_devices_needs_its_optimizer_on_the_host():
    division = Division(tensor=4, data=2, sequence_parallel=True, expert=8, expert_tensor=1)
    whole = estimate(GLM_45_AIR, division, Training(recompute=FULL))[0]
    host = estimate(GLM_45_AIR, division, Training(recompute=FULL, optimizer_offload_fraction=1.0))[0]
    assert whole.total > 200 * GIB and whole.host_bytes < 8 * GIB
    assert host.parts["optimizer state"] == 0
    assert host.parts["weights"] + host.parts["gradients"] == pytest.approx(641e9 / 8, rel=0.07)  # norms, TP 4 of dense
    state = whole.parts["optimizer state"]
    assert host.host_bytes - whole.host_bytes == pytest.approx(state * 16 / 12, rel=1e-6)  # and a gradient each


@pytest.mark.parametrize(
    ("model", "measured_gib"),
    # 16 x 1,280 packed tokens, no recomputation, one H200: reference layers that keep more than ours (keys and values
    # repeated for each query head, whole float32 logits, experts stacked at each call).
    [(QWEN3_06B, 58), (QWEN3_30B_6_LAYERS, 117)],
)
def test_a_step_takes_less_than_measured_with_layers_that_keep_more(model, measured_gib):
    total = estimate(model, Division(), Training(tokens=20_480))[0].total
    assert 0.6 * measured_gib * GIB < total < measured_gib * GIB


def test_recomputation_keeps_less_the_more_it_repeats():
    layers = range(28)

    def kept(**recompute):
        return stage_numbers(QWEN3_06B, Division(), layers, Recompute(**recompute))

    none = kept()
    assert kept(granularity="full", method="uniform") == 28 * 1024
    assert kept(granularity="full", method="uniform", num_layers=4) == 7 * 1024
    assert kept(granularity="full", method="block", num_layers=28) == 28 * 1024
    block = kept(granularity="full", method="block", num_layers=7)
    assert block == pytest.approx(7 * 1024 + none * 21 / 28)
    norms, mlp = (kept(granularity="selective", modules=[m]) for m in ("layernorm", "mlp"))
    assert none - norms == 28 * 2 * 1024 and none - mlp == 28 * 3 * 3072


def test_experts_keep_every_routed_token():
    none = layer_numbers(QWEN3_30B, Division(), 0, Recompute())
    act = layer_numbers(QWEN3_30B, Division(), 0, Recompute(granularity="selective", modules=["moe_act"]))
    moe = layer_numbers(QWEN3_30B, Division(), 0, Recompute(granularity="selective", modules=["moe"]))
    assert none - act == 8 * 768
    assert none - moe == 8 * (2048 + 3 * 768) + 8 * 128
    shared = Recompute(granularity="selective", modules=["shared_experts"])
    glm = layer_numbers(GLM_45_AIR, Division(), 1, Recompute())
    assert glm - layer_numbers(GLM_45_AIR, Division(), 1, shared) == 3 * 1408


def test_tensor_parallel_ranks_share_activations_and_sequence_parallel_the_rest():
    one, tp = (layer_numbers(QWEN3_8B, Division(tensor=n), 0, Recompute()) for n in (1, 4))
    sp = layer_numbers(QWEN3_8B, Division(tensor=4, sequence_parallel=True), 0, Recompute())
    assert sp == one / 4 and sp < tp < one


@pytest.mark.parametrize(
    ("pipeline", "virtual", "rank", "micro_batches", "alive"),
    [
        (1, 1, 0, None, 1),
        (4, 1, 0, None, 4),
        (4, 1, 3, None, 1),
        (4, 1, 0, 2, 2),
        (2, 2, 0, None, 5),
        (2, 2, 1, None, 3),
        (2, 2, 0, 2, 4),
    ],
)
def test_stages_in_flight(pipeline, virtual, rank, micro_batches, alive):
    assert stages_in_flight(Division(pipeline=pipeline, virtual=virtual), rank, micro_batches) == alive


def test_activations_in_flight_follow_megatrons_schedule_of_larger_groups_of_micro_batches():
    # Two ranks with two stages each, groups of 4. Rank 0 runs micro-batches 1 to 4 through its first stage and then
    # through its second: 4 forward passes, 2 more until rank 1 sends the first gradient, and the one it is in: 7.
    division = Division(pipeline=2, virtual=2, group=4)
    assert [stages_in_flight(division, rank, None) for rank in (0, 1)] == [7, 5]
    assert [stages_in_flight(division, rank, 2) for rank in (0, 1)] == [4, 4]
    of_pairs, of_fours = (
        estimate(QWEN3_06B, Division(pipeline=2, virtual=2, group=group), Training(tokens=1000))[0].moments
        for group in (None, 4)
    )
    # Kept by a layer for a token: two norms take and give 1,024 numbers; 2,048 queries and twice 1,024 keys;
    # the query norm's 2,048; rotated queries and keys; attention's 2,048; three times the MLP's 3,072.
    layer = 4 * 1024 + (2048 + 2 * 1024) + 2048 + (2048 + 1024) + 2048 + 3 * 3072
    stage = 7 * layer  # of 28 on four stages
    assert of_fours["activations"] - of_pairs["activations"] == pytest.approx(2 * stage * 1000 * 2, abs=2)


def test_the_last_stage_has_the_head_and_the_first_the_embedding():
    first, middle, last = estimate(QWEN3_8B, Division(pipeline=3), Training())
    vocabulary = 2 * 151_936 * 4096
    assert first.parts["weights"] - middle.parts["weights"] == vocabulary
    assert last.parts["weights"] - middle.parts["weights"] == vocabulary + 2 * 4096
    assert last.moments["forward alone"] > first.moments["forward alone"]


def test_the_total_is_the_sum_with_the_largest_moment():
    got = estimate(QWEN3_06B, Division(data=2), Training(tokens=512))[0]
    assert got.total == sum(got.parts.values())
    assert got.parts["working memory"] == max(got.moments.values())


def test_an_engine_takes_its_share_and_keeps_what_its_weights_leave():
    engine = Engine(device_bytes=80 * GIB, utilization=0.5, max_model_len=4096)
    assert parts(QWEN3_8B, engine=engine)["engine"] == 40 * GIB
    a_token = 2 * 36 * 8 * 128 * 2
    tokens = engine_cache_tokens(QWEN3_8B, engine, "bfloat16")
    assert tokens == int((37 * GIB - 2 * parameters(QWEN3_8B).total) / a_token)
    small = dataclasses.replace(engine, utilization=0.2)
    assert engine_cache_tokens(QWEN3_8B, small, "bfloat16") < 0
    stated = dataclasses.replace(engine, cache_bytes=GIB)
    assert engine_cache_tokens(QWEN3_8B, stated, "bfloat16") == int(GIB / a_token)


def test_an_engine_beside_the_trainer_holds_a_layers_experts_whole_at_a_sync():
    engine = Engine(device_bytes=139 * GIB, utilization=0.3, tensor=2)
    division = Division(data=8, expert=8)
    with_engine = estimate(QWEN3_30B, division, Training(), engine)[0].moments["weight sync"]
    alone = estimate(QWEN3_30B, division, Training())[0].moments["weight sync"]
    layer = 2 * 128 * 3 * 768 * 2048
    assert with_engine - alone == layer + layer // 2 + 2 * 512 * MIB


def _host(division, model=QWEN3_4B, **settings):
    return estimate(model, division, Training(**settings))[0].host_bytes


def test_a_checkpoint_written_in_the_background_is_copied_to_the_host_once():
    for division in (Division(), Division(data=4)):
        none = _host(division)
        copied = _host(division, saves_optimizer=True, async_save=True)
        assert copied - none == 14 * parameters(QWEN3_4B).total / division.world_size
        weights = 2 * parameters(QWEN3_4B).total / division.world_size
        assert _host(division, async_save=True) - none == weights
        assert _host(division, async_save=True, saves_reference=True) - none == 2 * weights
        assert _host(division, saves_reference=True) == none, "written from where it is"


def test_a_save_gathers_on_the_host_the_state_that_ranks_share():
    total = parameters(QWEN3_4B).total
    assert _host(Division(data=4), saves_optimizer=True) - _host(Division(data=4)) == 12 * total / 4
    assert _host(Division(), saves_optimizer=True) == _host(Division())
    assert _host(Division(data=4), saves_optimizer=True, use_distributed_optimizer=False) == _host(Division())
    dense = parameters(QWEN3_30B).total - 48 * 128 * 3 * 768 * 2048
    experts = Division(data=8, expert=8)
    assert _host(experts, QWEN3_30B, saves_optimizer=True) - _host(experts, QWEN3_30B) == 12 * dense / 8


def test_of_ranks_on_several_nodes_the_first_holds_what_a_save_gathers():
    """All of it is on the first node: an eighth of it a rank there, whatever the number of nodes."""
    division, total = Division(data=32), parameters(QWEN3_4B).total
    assert _host(division, saves_optimizer=True, ranks_per_node=8) - _host(division) == 12 * total / 8
    stages = Division(data=8, pipeline=4)  # one stage a node
    saved, none = (
        sum(d.host_bytes for d in estimate(QWEN3_4B, stages, Training(saves_optimizer=x, ranks_per_node=8)))
        for x in (True, False)
    )
    assert saved - none == pytest.approx(
        12 * sum(d.parameters.total for d in estimate(QWEN3_4B, stages, Training())) / 8
    )
