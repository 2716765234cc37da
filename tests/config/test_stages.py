"""Layers over pipeline stages."""

from typing import Any

import pytest

from vime.config.stages import Stages, stages_of
from vime.errors import ConfigError

VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
EACH = "num_layers_per_virtual_pipeline_stage"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = {"account_for_embedding_in_pipeline_split": True}, {"account_for_loss_in_pipeline_split": True}


def layout(text: str) -> dict[str, Any]:
    return {"pipeline_model_parallel_layout": text}


@pytest.mark.parametrize(
    ("megatron", "ranks", "num_layers", "want"),
    [
        ({}, 1, 5, (5,)),
        ({}, 2, 8, (4, 4)),
        (VIRTUAL, 2, 8, (2, 2, 2, 2)),
        ({EACH: 1}, 2, 6, (1,) * 6),
        ({EACH: 4}, 2, 8, (4, 4)),
        ({FIRST: 1}, 3, 9, (1, 4, 4)),
        ({LAST: 10}, 4, 46, (12, 12, 12, 10)),  # GLM-4.5-Air
        ({FIRST: 5, LAST: 3}, 2, 8, (5, 3)),
        ({FIRST: 2, LAST: 4, **VIRTUAL}, 3, 14, (1, 4, 2, 1, 4, 2)),
        ({FIRST: 6, LAST: 2, **VIRTUAL}, 2, 8, (3, 1, 3, 1)),
        ({**EMBEDDING, **LOSS}, 4, 46, (11, 12, 12, 11)),
        ({**EMBEDDING, **LOSS, **VIRTUAL}, 2, 2, (0, 1, 1, 0)),
        (LOSS, 2, 3, (2, 1)),
        (layout("Et*3|(tt|)*2ttL"), 2, 9, (3, 2, 2, 2)),
        (layout("E, t | t*2, L"), 2, 3, (1, 2)),
    ],
)
def test_layers_of_each_stage(megatron: dict[str, Any], ranks: int, num_layers: int, want: tuple[int, ...]) -> None:
    assert stages_of(megatron, ranks).layers(num_layers) == want


@pytest.mark.parametrize(
    ("megatron", "ranks", "sentence"),
    [
        ({}, 3, "which does not divide the model's 8 layers; cut them unevenly with --decoder-first"),
        (LOSS, 2, "does not divide the model's 8 layers + loss"),
        ({"virtual_pipeline_model_parallel_size": 3}, 2, "-rank 3 does not divide the 4 layers of a pipeline rank"),
        ({EACH: 3}, 2, "--num-layers-per-virtual-pipeline-stage 3 does not divide the 4 layers"),
        ({EACH: 8}, 2, "--num-layers-per-virtual-pipeline-stage 8 does not divide the 4 layers"),
        ({**VIRTUAL, EACH: 2}, 2, "say the same in two ways"),
        ({EACH: 2, FIRST: 4}, 2, "does not go with stages of unequal length"),
        (VIRTUAL, 1, "give --pipeline-model-parallel-size, too"),
        (layout("EtL"), 1, "--pipeline-model-parallel-layout: layers are on one rank"),
        ({FIRST: 0}, 2, "--decoder-first-pipeline-num-layers is 0; at least 1"),
        ({FIRST: 7}, 4, "were given 7 of the model's 8 layers, and the 3 others cannot share 1 evenly"),
        ({FIRST: 8}, 2, "the 1 others cannot share 0"),
        ({FIRST: 3, LAST: 3}, 2, "the 0 others cannot share 2"),
        ({FIRST: 3, **VIRTUAL}, 2, "does not divide the 3 and 5 layers"),
        ({FIRST: 3, **LOSS}, 2, "count embedding and loss yourself"),
        ({**layout("Et*4|t*4L"), FIRST: 3}, 2, "leave out --decoder-first-pipeline-num-layers"),
        (layout("Et*4|t*3L"), 2, "has 7 decoder layers (t), the model 8"),
        (layout("Et*4|t*2|t*2L"), 2, "has 3 stages, no multiple of --pipeline-model-parallel-size 2"),
        (layout("t*4|t*4L"), 2, "must begin with the one E"),
        (layout("Et*4|t*4mL"), 2, "multi-token-prediction layer is not trained"),
        ({"microbatch_group_size_per_vp_stage": 2}, 2, "orders the work of virtual stages; add --num-virtual"),
        ({**VIRTUAL, "microbatch_group_size_per_vp_stage": 1}, 2, "need at least 2"),
        ({"overlap_p2p_comm": True}, 2, "only virtual stages can overlap"),
        ({"batch_p2p_comm": False}, 2, "--no-batch-p2p-comm is for virtual stages"),
        ({**VIRTUAL, "overlap_p2p_comm": False}, 2, "give wrong gradients on two ranks and hang on four"),
        ({**VIRTUAL, "batch_p2p_comm": True}, 2, "give wrong gradients on two ranks and hang on four"),
    ],
)
def test_stages_that_do_not_come_out_are_named(megatron: dict[str, Any], ranks: int, sentence: str) -> None:
    stages = stages_of(megatron, ranks)
    problems = list(stages.problems(8))
    assert any(sentence in p for p in problems), problems
    with pytest.raises(ConfigError):
        stages.layers(8)


def test_the_micro_batches_of_virtual_stages_come_in_groups() -> None:
    assert stages_of({}, 4).micro_batch_multiple == 1
    assert stages_of(VIRTUAL, 4).micro_batch_multiple == 4
    assert stages_of({EACH: 2}, 4).micro_batch_multiple == 4
    assert stages_of(layout("Et|t|t|tL"), 2).micro_batch_multiple == 2
    assert stages_of({**VIRTUAL, "microbatch_group_size_per_vp_stage": 6}, 4).micro_batch_multiple == 6


def test_what_needs_no_model_is_checked_without_one() -> None:
    assert any("give one" in p for p in stages_of({**VIRTUAL, EACH: 2}, 2).problems(None))
    assert not list(stages_of(VIRTUAL, 2).problems(None))


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_pipeline_of_no_ranks_is_named(ranks: int) -> None:
    assert list(Stages(ranks=ranks).problems(4)) == [f"--pipeline-model-parallel-size is {ranks}; at least 1 is needed"]


@pytest.mark.parametrize("layout", ["Et*99999999|L", "E(t|)*1000000000L", "Et*" + "9" * 5000 + "|L"])
def test_a_layout_that_repeats_without_end_is_refused_and_not_written_out(layout: str) -> None:
    (problem,) = Stages(ranks=2, layout=layout).problems(4)
    assert "repeats too often; 10000 times are the most" in problem
