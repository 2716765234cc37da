"""Recomputation settings: what is missing, what nobody would read, what the model does not have."""

import pytest

from vime.config import Config
from vime.config.validate_recompute import check_recompute, stage_layers

DENSE = {"num_layers": 6}
MOE = {"num_layers": 6, "num_moe_experts": 8, "moe_layer_freq": [1] * 6}
GLM = {**MOE, "moe_layer_freq": [0] + [1] * 5, "moe_shared_expert_intermediate_size": 8}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def problems(shape=DENSE, **megatron):
    config = Config(megatron=megatron)
    return list(check_recompute(config, shape, stage_layers(config, shape)))


def selective(*modules, shape=DENSE, **more):
    return problems(shape, recompute_granularity="selective", recompute_modules=list(modules), **more)


def test_what_fits_the_model_is_right():
    assert not problems() and not problems(**FULL)
    assert not problems(**{**FULL, "recompute_method": "block", "recompute_num_layers": 4})
    assert not problems(recompute_granularity="selective")
    assert not selective("core_attn", "layernorm", "mlp")
    assert not selective("moe", "layernorm", shape=MOE)
    assert not selective("mlp", "moe_act", "shared_experts", shape=GLM)
    assert not selective("mlp", "moe", shape={})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (problems(recompute_method="uniform"), "--recompute-method is read with --recompute-granularity only"),
        (problems(recompute_modules=["mlp"]), "--recompute-modules is read with --recompute-granularity only"),
        (problems(**{**FULL, "recompute_method": None}), "full needs --recompute-method"),
        (problems(**{**FULL, "recompute_num_layers": None}), "--recompute-num-layers is None"),
        (problems(**{**FULL, "recompute_num_layers": 4}), "4, which does not divide a pipeline stage's 6 layers"),
        (
            problems(**{**FULL, "recompute_num_layers": 2}, pipeline_model_parallel_size=2),
            "2, which does not divide a pipeline stage's 3 layers",
        ),
        (problems(**FULL, recompute_modules=["mlp"]), "--recompute-modules is for --recompute-granularity selective"),
        (selective("mlp", recompute_num_layers=1), "--recompute-num-layers is 1, but it is for"),
        (selective("mpl"), "names 'mpl', which is none of core_attn, layernorm, mlp"),
        (selective("moe"), "names moe, which this model does not have; it has core_attn, layernorm, mlp"),
        (selective("mla_up_proj"), "names mla_up_proj, which this model does not have"),
        (selective("mlp", shape=MOE), "names mlp, which this model does not have"),
        (selective("shared_experts", shape=MOE), "names shared_experts, which this model does not have"),
        (problems(MOE, moe_shared_expert_overlap=True), "is for shared experts, which the model does not have"),
        (selective("shared_experts", shape=GLM, moe_shared_expert_overlap=True), "exclude each other; drop one"),
        (selective("moe", "moe_act", shape=GLM), "which moe repeats already; drop moe_act"),
    ],
)
def test_each_mistake_has_one_sentence(found, message):
    assert len(found) == 1 and message in found[0]
