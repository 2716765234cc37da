"""Ranks that divide the work do what one process does: the smoke of the parallel matrix, and what its table cannot say.

The processes are started once and run the cases one after the other; each test looks at one case. All cases:
`make test-parallel`.
"""

import re

import pytest

from tests.trainer.megatron.layout_case import LOSSES, with_batches
from tests.trainer.megatron.matrix import MATRIX, SMOKE
from tests.trainer.megatron.rank_differences import Differences, compare_metrics
from tests.trainer.megatron.run_matrix import rows_of, run_cases
from vime.config import AlgoConfig, RolloutConfig, TrainConfig

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder):
    return run_cases(folder, SMOKE)


def ranks_of(outcomes, name):
    assert not outcomes[name].failure, outcomes[name].failure
    return outcomes[name].ranks


@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_ranks_train_like_one_process(outcomes, folder, case):
    [(row, problems)] = rows_of([case], outcomes, folder)
    print(*row)
    assert not problems, problems


@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_a_rank_gathers_weights_one_tensor_at_a_time(outcomes, case):
    """Rank 0 holds the parts of a Megatron tensor and a whole; the others copies of parts, and no rank a model."""
    for rank, found in enumerate(ranks_of(outcomes, str(case))):
        peak, largest = found["gathered"]
        assert peak <= (2 if rank == 0 else 1) * largest, (rank, peak, largest)


@pytest.mark.parametrize("saved", [c for c in SMOKE if f"{c} from {c}" in map(str, SMOKE)], ids=str)
def test_the_same_layout_goes_on_bit_by_bit(outcomes, saved):
    again = f"{saved} from {saved}"
    for straight, resumed in zip(ranks_of(outcomes, str(saved)), ranks_of(outcomes, again), strict=True):
        assert straight["random"] == resumed["random"]
        for want, got in zip(straight["metrics"][1:], resumed["metrics"], strict=True):
            assert {n: v for n, v in got.items() if n.startswith("train/")} == {
                n: v for n, v in want.items() if n.startswith("train/")
            }


@pytest.mark.parametrize(
    ("name", "differ"), [("DP2", ()), ("CP2", ()), ("TP2+SP", ("own",)), ("PP2", ("own", "shared"))]
)
def test_random_streams_differ_where_ranks_hold_different_tensors(outcomes, name, differ):
    first, second = (rank["random"] for rank in ranks_of(outcomes, f"{name} qwen3"))
    assert {stream for stream in first if first[stream] != second[stream]} == set(differ)


@pytest.mark.parametrize("saved", [c for c in SMOKE if c.saves and c.loss == "rl"], ids=str)
def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(outcomes, folder, make_trainer, saved):
    [reference] = ranks_of(outcomes, str(saved.reference))
    assert ranks_of(outcomes, str(saved))
    trainer = make_trainer(
        folder / saved.model,
        algo=AlgoConfig(**LOSSES["rl"]),
        rollout=RolloutConfig(rollout_temperature=0.8),
        train=TrainConfig(lr_decay_style="cosine", lr_decay_iters=10),
        total_steps=10,
        megatron={"lr": 1e-2, "adam_eps": 1e-2},
    )
    trainer.load(folder / f"checkpoint {saved}")
    got = [trainer.train(batch) for batch in with_batches(saved.reference, 1).batches[1:]]
    result = Differences()
    compare_metrics(result, saved, [{"metrics": got}], reference["metrics"][1:], 1e-5)
    assert not result.problems, result.problems


def test_the_matrix_names_each_case_once_and_each_layout_with_its_ranks():
    names = [str(c) for c in MATRIX]
    assert len(set(names)) == len(names)
    assert all(c.loads in names[: names.index(str(c))] for c in MATRIX if c.loads), "saved before it is loaded"
    assert all(c.world_size in (1, 2, 4) for c in MATRIX)
    for case in MATRIX:
        tokens = re.sub(r"\+SP|\d", "", case.layout).split()
        assert set(tokens) <= {"DP", "TP", "PP", "VP", "CP", "EP", "ETP"}, case


DENSE = [
    "DP2",
    "TP2",
    "TP2+SP",
    "PP2",
    "PP2 VP2",
    "CP2",
    "TP2+SP PP2",
    "TP2+SP CP2",
    "DP2 TP2+SP",
    "DP2 PP2",
    "PP2 CP2",
]
EXPERTS = ["DP2", "TP2+SP", "PP2", "PP2 VP2", "CP2", "DP2 EP2", "TP2+SP ETP1", "TP2+SP EP2 ETP1", "CP2 EP2"]
EXPERTS += ["DP2 TP2+SP EP4 ETP1", "DP2 PP2 EP2", "DP2 CP2 EP2"]


@pytest.mark.parametrize(("models", "layouts"), [(("qwen3", "llama"), DENSE), (("moe",), EXPERTS), (("glm",), EXPERTS)])
def test_the_matrix_holds_every_layout_of_each_kind_of_model(models, layouts):
    there = {c.layout for c in MATRIX if c.model.startswith(models) and c.loss == "rl" and not c.loads}
    assert not set(layouts) - there
