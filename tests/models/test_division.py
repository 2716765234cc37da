"""Parameter counts, whole and by rank. Totals: computed with transformers 5.24 from the published configurations."""

import pytest

from tests.models.shapes import GLM_45, GLM_45_AIR, QWEN3_06B, QWEN3_4B, QWEN3_8B, QWEN3_17B, QWEN3_30B
from vime.models.division import Division, padded_rows, rank_parameters
from vime.models.parameters import parameters


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (QWEN3_06B, 596_049_920),
        (QWEN3_17B, 1_720_574_976),
        (QWEN3_4B, 4_022_468_096),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B, 30_532_122_624),
        (GLM_45_AIR, 106_852_245_504),
        (GLM_45, 352_797_814_784),
    ],
)
def test_counts_are_those_of_transformers(model, count):
    assert rank_parameters(model, Division(), 0).total == parameters(model).total == count


def test_stages_hold_every_parameter_once_and_a_tied_head_twice():
    untied = [rank_parameters(QWEN3_8B, Division(pipeline=4), rank).total for rank in range(4)]
    assert sum(untied) == parameters(QWEN3_8B).total
    tied = [rank_parameters(QWEN3_4B, Division(pipeline=4), rank).total for rank in range(4)]
    assert sum(tied) == parameters(QWEN3_4B).total + QWEN3_4B.vocab_size * QWEN3_4B.transformer["hidden_size"]


def test_tensor_parallel_ranks_hold_a_part_of_matrices_and_all_of_norms():
    one, eight = (rank_parameters(QWEN3_8B, Division(tensor=tp), 0).dense for tp in (1, 8))
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert (one - norms) == 8 * (eight - norms)


def test_experts_are_spread_over_their_own_ranks():
    division = Division(tensor=2, data=4, expert=4, expert_tensor=1)
    own = rank_parameters(QWEN3_30B, division, 0)
    whole = rank_parameters(QWEN3_30B, Division(), 0)
    assert own.experts * 4 == whole.experts
    assert division.expert_copies == 2 and division.dense_copies == 4
    assert Division(tensor=2, expert=2).etp == 2


def test_virtual_stages_go_round_the_pipeline_and_may_be_uneven():
    even = Division(pipeline=2, virtual=2)
    assert even.layers(0, 8) == [range(0, 2), range(4, 6)]
    assert even.layers(1, 8) == [range(2, 4), range(6, 8)]
    uneven = Division(pipeline=2, stage_layers=(5, 3))
    assert uneven.layers(0, 8) == [range(0, 5)] and uneven.layers(1, 8) == [range(5, 8)]


def test_rows_of_the_vocabulary_are_padded_to_whole_parts():
    assert padded_rows(151_936, 8) == 18_992 and padded_rows(10, 3) == 4
