import pytest

from vime.observability.metrics import METRICS, UnknownMetric, check_names, is_defined


def test_every_row_is_complete_and_every_name_once():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert all(m.unit and m.definition for m in METRICS)


@pytest.mark.parametrize(
    "name",
    [
        "train/loss",
        "train/lr-pg_0",
        "eval/arith",
        "eval/arith-truncated_ratio",
        "perf/rollout_time",
        "custom/x/y",
        "rollout/response_len/mean",
        "train/train_rollout_logprob_abs_diff_p99",
        "rollout/dynamic_filter/drop_zero_std",
    ],
)
def test_emitted_names_are_defined(name):
    assert is_defined(name)


@pytest.mark.parametrize("name", ["train/los", "loss", "rollout/raw_reward/median", "rollout/response_len/mean/x", ""])
def test_other_names_are_not(name):
    assert not is_defined(name)


def test_unknown_names_are_refused_all_at_once_with_the_nearest():
    with pytest.raises(UnknownMetric, match=r"'train/los' \(nearest: train/loss\), 'zzz'; add them"):
        check_names(["train/los", "train/loss", "zzz"])
